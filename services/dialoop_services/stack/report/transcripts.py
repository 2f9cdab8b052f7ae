"""Which held-out task to show before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.views.display import Row, read_rows

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAndAfter:
    """Two rows of trajectories.jsonl."""

    before: Row
    after: Row


def choose(*paths: Path) -> BeforeAndAfter | None:
    """A task that was failed before and solved after, else any task played both times.

    Without evaluations: the first and the last trajectory that was trained on.
    """
    by_label: dict[str, dict[str, Row]] = {"before_greedy": {}, "after_greedy": {}}
    trained: list[Row] = []
    for row in read_rows(*paths):
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
