"""`dialoop show`: one trajectory of a run, in colour by who wrote what, and token by token."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from dialoop.cli.console import rich_console
from dialoop.errors import DialoopError, InvalidInput, NotFound
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.views.display import (
    legend,
    messages_of,
    policy_of,
    read_rows,
    token_table,
    transcript,
)
from dialoop.views.run_files import TRAJECTORIES, trajectory_files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from dialoop.views.display import Row


def show(arguments: argparse.Namespace) -> int:
    """Print the trajectory that the arguments select."""
    path = arguments.path / TRAJECTORIES if arguments.path.is_dir() else arguments.path
    parts = (trajectory_files(arguments.path) if arguments.path.is_dir() else ()) or (path,)
    try:
        rows = (row for row in read_rows(*parts) if _matches(row, arguments))
        row, which = _choose(rows, arguments)
    except OSError as error:
        raise NotFound(
            f"{error.filename} cannot be read: {error.strerror}.", remedy="Name a run's directory."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(
            f"{path} is not a file of trajectories.",
            remedy=f"Name a {TRAJECTORIES} or a run's directory.",
        ) from None
    _print(row, which, _tokenizer_of(path.parent), arguments.tokens)
    return 0


def _matches(row: Row, arguments: argparse.Namespace) -> bool:
    return (
        row["trajectory_id"].startswith(arguments.id)
        and arguments.task in ("", row["task_key"])
        and arguments.label in ("", row["label"])
        and arguments.outcome in ("", row["outcome"])
    )


def _choose(rows: Iterator[Row], arguments: argparse.Namespace) -> tuple[Row, str]:
    """Return the selected row, and its number among how many; keep no more rows than needed."""
    sign = arguments.best - arguments.worst
    kept: deque[tuple[int, Row]] = deque(
        maxlen=1 if sign else min(max(1, -arguments.index), sys.maxsize)
    )
    count = 0
    for count, row in enumerate(rows, start=1):
        if sign:
            is_wanted = not kept or sign * row["reward"] > sign * kept[0][1]["reward"]
        else:
            is_wanted = arguments.index < 0 or count == arguments.index + 1
        if is_wanted:
            kept.append((count, row))
    if not count:
        raise NotFound(
            f"No trajectory in {arguments.path} matches --task, --id, --label and --outcome.",
            remedy="Leave some of them out.",
        )
    if not sign and not -count <= arguments.index < count:
        raise NotFound(
            f"--index is {arguments.index}, and {count} trajectories match.",
            remedy=f"Use {-count} to {count - 1}.",
        )
    number, row = kept[0]
    return row, f"{number} of {count}"


def _tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """Return the tokenizer of the run's model, or None where it is gone."""
    try:
        config = json.loads((run_dir / "run.json").read_text("utf-8"))["config"]
        return Tokenizer.from_directory(Path(config["model"]["directory"] or run_dir / "model"))
    except (OSError, ValueError, KeyError, DialoopError):
        return None


def _print(row: Row, which: str, tokenizer: Tokenizer | None, with_tokens: bool) -> None:
    console = rich_console()
    label = f", {row['label']}" if row["label"] else ""
    head = (
        f"trajectory {row['trajectory_id']} ({which})\n"
        f"task {row['task_key']} of {row['environment']}, {row['outcome']}{label}, "
        f"train step {row['train_step']}, policy {policy_of(row) or '-'}\n"
        f"reward {row['reward']:g}, {row['done_reason'].lower()}, "
        f"{row['num_tool_calls']} tool calls"
    )
    console.print(Text(head, style="dim"), soft_wrap=True)
    for failure in row["failures"]:
        line = f"{failure['owner'].lower()} failed: {failure['reason']}: {failure['message']}"
        console.print(Text(line, style="bold red"), soft_wrap=True)
    console.print(messages_of(row) if tokenizer is None else transcript(row, tokenizer))
    console.print(legend())
    if with_tokens:
        for sequence in row["sequences"]:
            console.print(token_table(row, sequence, tokenizer))
