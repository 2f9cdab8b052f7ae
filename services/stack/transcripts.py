"""One held-out task before and after training, coloured by who wrote each token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.sequences import Source
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop.tokenizer import Tokenizer

_STYLES = {
    Source.PROMPT: "blue",
    Source.TEMPLATE: "dim",
    Source.MODEL: "bold green",
    Source.ENVIRONMENT: "yellow",
    Source.TOOL: "bold magenta",
}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAndAfter:
    """Two rows of trajectories.jsonl."""

    before: Row
    after: Row


def choose(path: Path) -> BeforeAndAfter | None:
    """A task that was failed before and solved after, else any task played both times.

    Without evaluations: the first and the last trajectory that was trained on.
    """
    by_label: dict[str, dict[str, Row]] = {"before_greedy": {}, "after_greedy": {}}
    trained: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["label"] in by_label:
                by_label[row["label"]].setdefault(row["task_key"], row)
            elif row["outcome"] == "trained":
                trained = [*trained[:1], row]
    return _improved(by_label["before_greedy"], by_label["after_greedy"]) or _ends(trained)


def _improved(before: Mapping[str, Row], after: Mapping[str, Row]) -> BeforeAndAfter | None:
    both = [key for key in before if key in after]
    better = [key for key in both if before[key]["reward"] < after[key]["reward"]]
    key = next(iter(better or both), None)
    return None if key is None else BeforeAndAfter(before=before[key], after=after[key])


def _ends(trained: list[Row]) -> BeforeAndAfter | None:
    return BeforeAndAfter(before=trained[0], after=trained[-1]) if trained else None


def transcript(row: Row, tokenizer: Tokenizer) -> Text:
    """All sequences of a trajectory; a fork is announced by its cause."""
    text = Text()
    for index, sequence in enumerate(row["sequences"]):
        if index:
            text.append(f"\n[fork: {sequence['fork_cause']}]\n", style="bold red")
        ids = sequence["token_ids"]
        for segment in sequence["segments"]:
            part = ids[segment["start"] : segment["start"] + segment["length"]]
            text.append(tokenizer.decode(part), style=_STYLES[Source[segment["source"]]])
    return text


def policy_of(row: Row) -> str:
    """The policy versions that sampled a trajectory: "main-1", or "main-4, main-5"."""
    segments = (segment for sequence in row["sequences"] for segment in sequence["segments"])
    names = (
        f"{s['lineage']}-{s['policy_version']}" for s in segments if s["policy_version"] is not None
    )
    return ", ".join(dict.fromkeys(names))


def legend() -> Text:
    """Which colour is whose."""
    parts = (Text(source.name.lower(), style=style) for source, style in _STYLES.items())
    return Text(" ").join(parts)
