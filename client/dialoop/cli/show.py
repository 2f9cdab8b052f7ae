"""`dialoop show`: one trajectory of a run, in colour by who wrote what, and token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from dialoop.cli.console import rich_console
from dialoop.errors import DialoopError, InvalidInput, NotFound
from dialoop.tokenizer import Tokenizer
from dialoop.transcripts import (
    legend,
    messages_of,
    policy_of,
    read_rows,
    token_table,
    transcript,
)

if TYPE_CHECKING:
    import argparse

    from dialoop.transcripts import Row

_FILE = "trajectories.jsonl"


def show(given: argparse.Namespace) -> int:
    """Print the trajectory that was asked for."""
    path = given.path / _FILE if given.path.is_dir() else given.path
    rows = _matching(path, given)
    number = _chosen(rows, given)
    _print(rows[number], f"{number + 1} of {len(rows)}", _tokenizer_of(path.parent), given.tokens)
    return 0


def _matching(path: Path, given: argparse.Namespace) -> list[Row]:
    try:
        rows = [row for row in read_rows(path) if _matches(row, given)]
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}.", remedy="Name a run's directory."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(
            f"{path} is not a file of trajectories.", remedy=f"Name a {_FILE}."
        ) from None
    if not rows:
        raise NotFound(f"No trajectory in {path} is like that.", remedy="Ask for less.")
    return rows


def _matches(row: Row, given: argparse.Namespace) -> bool:
    return (
        row["trajectory_id"].startswith(given.id)
        and given.task in ("", row["task_key"])
        and given.label in ("", row["label"])
        and given.outcome in ("", row["outcome"])
    )


def _chosen(rows: list[Row], given: argparse.Namespace) -> int:
    numbers = range(len(rows))
    if given.best:
        return max(numbers, key=lambda n: float(rows[n]["reward"]))
    if given.worst:
        return min(numbers, key=lambda n: float(rows[n]["reward"]))
    if not -len(rows) <= given.index < len(rows):
        raise NotFound(
            f"There is no index {given.index}.", remedy=f"{len(rows)} trajectories are like that."
        )
    return int(given.index) % len(rows)


def _tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """The tokenizer of the run's model, where it still is."""
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
