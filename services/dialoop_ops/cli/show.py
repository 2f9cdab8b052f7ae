"""`dialoop show`: trajectories of a run: one in colour and token by token, a list, or a group."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput, NotFound
from dialoop_services.trainer.records.rows import METRICS, TRAJECTORIES, trajectory_files
from rich.text import Text

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.runs.display import (
    legend,
    messages_of,
    policy_of,
    read_rows,
    token_table,
    transcript,
    visible,
)
from dialoop_ops.runs.filters import Filters
from dialoop_ops.runs.run_config import tokenizer_of
from dialoop_ops.runs.summaries import TRAINED, summary_of, text_of, versions_by_step

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_ops.runs.display import Row
    from dialoop_ops.runs.summaries import TrajectorySummary, Versions

_NOT_READ = (ValueError, KeyError, TypeError)
_LINE = "{:>6} {:8} {:12.12} {:14.14} {:>5} {:>8} {:>9} {:12} {:>5} {:>6} {:12} {}"
_HEADS = (
    *("#", "id", "task", "outcome", "step", "reward", "advantage", "policy", "stale", "tokens"),
    *("stop", "answer"),
)


def show(arguments: argparse.Namespace) -> int:
    """Print the trajectory that the arguments select, its group, or all that match."""
    filters = _filters_of(arguments)
    path = arguments.path / TRAJECTORIES if arguments.path.is_dir() else arguments.path
    parts = (trajectory_files(arguments.path) if arguments.path.is_dir() else ()) or (path,)
    try:
        matches = _matches(parts, filters)
        if arguments.list:
            return _print_list((summary for summary, _ in matches), arguments.json)
        summary, row, which = _choose(matches, arguments)
        if arguments.group:
            group = Filters(group_id=summary.group_id) if summary.group_id else filters
            return _print_list((summary for summary, _ in _matches(parts, group)), arguments.json)
    except BrokenPipeError:  # of the reader of the list, and no file's
        raise
    except OSError as error:
        raise NotFound(
            f"{error.filename} cannot be read: {error.strerror}.", remedy="Name a run's directory."
        ) from None
    except _NOT_READ as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"{path} is not a file of trajectories.",
            remedy=f"Name a {TRAJECTORIES} or a run's directory.",
        ) from None
    if arguments.json:
        say(json.dumps(row, ensure_ascii=False))
    else:
        _print(row, which, tokenizer_of(path.parent), arguments.tokens)
    return 0


def _filters_of(arguments: argparse.Namespace) -> Filters:
    options = {"trajectory_id": "id", "task_key": "task"}
    names = (field.name for field in fields(Filters) if field.name != "group_id")
    return Filters.of({name: getattr(arguments, options.get(name, name)) for name in names})


def _matches(parts: Iterable[Path], filters: Filters) -> Iterator[tuple[TrajectorySummary, Row]]:
    """Yield the trajectories that the filters accept; their numbers are those of the console."""
    parts = tuple(parts)
    versions = _versions(parts[0].parent / METRICS)
    for number, row in enumerate(read_rows(*parts), start=1):
        summary = summary_of(row, number=number, versions=versions)
        if filters.accepts(summary, text_of(row) if filters.text else ""):
            yield summary, row


def _versions(metrics: Path) -> Versions:
    try:
        with metrics.open(encoding="utf-8") as lines:
            return versions_by_step(json.loads(line) for line in lines if line.endswith("\n"))
    except (OSError, *_NOT_READ):  # staleness is then unknown
        return {}


def _choose(
    matches: Iterator[tuple[TrajectorySummary, Row]], arguments: argparse.Namespace
) -> tuple[TrajectorySummary, Row, str]:
    """Return the selected row, and its number among how many; keep no more rows than needed."""
    sign = arguments.best - arguments.worst
    # What was trained comes first: that is what the policy has learned from.
    best: tuple[bool, float] = (False, 0.0)
    kept: deque[tuple[int, TrajectorySummary, Row]] = deque(
        maxlen=1 if sign else min(max(1, -arguments.index), sys.maxsize)
    )
    count = 0
    for count, (summary, row) in enumerate(matches, start=1):
        if sign:
            rank = (summary.outcome == TRAINED, sign * row["reward"])
            is_wanted = not kept or rank > best
            best = rank if is_wanted else best
        else:
            is_wanted = arguments.index < 0 or count == arguments.index + 1
        if is_wanted:
            kept.append((count, summary, row))
    if not count:
        raise NotFound(
            f"No trajectory in {arguments.path} matches the filters.",
            remedy="Leave some of them out.",
        )
    if not sign and not -count <= arguments.index < count:
        raise NotFound(
            f"--index is {arguments.index}, and {count} trajectories match.",
            remedy=f"Use {-count} to {count - 1}.",
        )
    number, summary, row = kept[0]
    return summary, row, f"{number} of {count}"


def _print_list(summaries: Iterable[TrajectorySummary], as_json: bool) -> int:
    """Print a line for each trajectory, as JSON or as a table."""
    if as_json:
        for summary in summaries:
            say(json.dumps(asdict(summary), ensure_ascii=False))
        return 0
    say(_LINE.format(*_HEADS))
    for s in summaries:
        versions = dict.fromkeys((s.oldest, s.newest))
        policy = f"{s.lineage}-{'..'.join(map(str, versions))}" if s.lineage else "-"
        cells = (s.number, s.trajectory_id[:8], s.task_key, s.outcome, s.train_step)
        numbers = (_short(s.reward), _short(s.advantage), policy, _short(s.staleness))
        rest = (s.num_sampled, " ".join(s.stop_reasons), s.preview)
        say(_printable(_LINE.format(*cells, *numbers, *rest)))
    return 0


def _printable(text: str) -> str:
    """Return the text with a dot for each character that could steer the terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print(row: Row, which: str, tokenizer: Tokenizer | None, with_tokens: bool) -> None:
    console = rich_console()
    label = f", {row['label']}" if row["label"] else ""
    head = (
        f"trajectory {row['trajectory_id']} ({which})\n"
        f"task {row['task_key']} of {row['environment']}, {row['outcome']}{label}, "
        f"train step {row['train_step']}, policy {policy_of(row) or '-'}\n"
        f"reward {row['reward']:g}, {row['done_reason'].lower()}, "
        f"tool calls: {row['num_tool_calls']}"
    )
    labels = ", ".join(f"{name} = {value}" for name, value in row.get("labels", {}).items())
    head += f"\nlabels: {visible(labels)}" if labels else ""
    console.print(Text(head, style="dim"), soft_wrap=True)
    for name, words in (
        (n, w) for t in row.get("turns", ()) for n, w in t.get("feedback", {}).items()
    ):
        console.print(Text(f"{name}: {visible(words)}", style="yellow"), soft_wrap=True)
    for failure in row["failures"]:
        line = f"{failure['owner'].lower()} failed: {failure['reason']}: {failure['message']}"
        console.print(Text(line, style="bold red"), soft_wrap=True)
    console.print(messages_of(row) if tokenizer is None else transcript(row, tokenizer))
    console.print(legend())
    if with_tokens:
        for sequence in row["sequences"]:
            console.print(token_table(row, sequence, tokenizer))
