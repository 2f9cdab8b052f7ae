"""What each config of `make learn` came to, as rows of a table and of summary.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

_FIGURES = (
    "heldout_sampled_before",
    "heldout_sampled_after",
    "heldout_sampled_gain",
    "heldout_greedy_before",
    "heldout_greedy_after",
    "tool_call_rate_before",
    "tool_call_rate_after",
    "num_train_steps",
    "wall_s",
    "cpu_s",
)
_COLUMNS = ("config", "sampled", "gain", "greedy", "tool calls", "steps", "s", "gates")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmResult:
    """A run of a config. `start`: run id of the demo it started from; empty without one.

    `figures` are the run's summary's of those names, none of a run that did not end.
    """

    name: str
    seed: int
    start: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    gates: Mapping[str, bool] = field(default_factory=dict)
    load: float = 0.0
    """What the machine did in the last minute, as os.getloadavg has it."""

    @classmethod
    def of(cls, name: str, summary: Mapping[str, Any] | None, *, start: str, seed: int) -> Self:
        """From the run's summary, or None where it left none."""
        if summary is None:
            return cls(name=name, seed=seed, start=start)
        return cls(
            name=name,
            seed=seed,
            start=start,
            figures={figure: summary[figure] for figure in _FIGURES},
            gates=dict(summary["gates"]),
            load=os.getloadavg()[0],
        )

    @property
    def holds(self) -> bool:
        """Whether it ended, and all that its config asks for came true."""
        return bool(self.gates) and all(self.gates.values())


def kept_outcomes(
    path: Path, new: Sequence[AlgorithmResult], *, start: str
) -> list[AlgorithmResult]:
    """The outcomes of an earlier summary that no new one replaces, of this demo's warm start."""
    if not path.is_file():
        return []
    rows = json.loads(path.read_text("utf-8"))["runs"]
    replaced = {(one.name, one.seed) for one in new}
    earlier = [AlgorithmResult(**row) for row in rows]
    return [o for o in earlier if (o.name, o.seed) not in replaced and o.start in ("", start)]


def table_of(outcomes: Iterable[AlgorithmResult]) -> Table:
    """One line per config; shares before and after training on the held-out tasks."""
    title = "Held-out accuracy and tool calls, before and after training"
    table = Table(*_COLUMNS, title=title, box=None, padding=(0, 2, 0, 0))
    for column in table.columns[:-1]:
        column.no_wrap = True  # eighty columns hold it
    for one in outcomes:
        table.add_row(*_cells(one))
    return table


def failures_of(outcomes: Iterable[AlgorithmResult]) -> list[str]:
    """One line for each gate that does not hold."""
    return [
        f"{one.name}, seed {one.seed}: {gate}"
        for one in outcomes
        for gate, holds in one.gates.items()
        if not holds
    ]


def _cells(one: AlgorithmResult) -> tuple[str | Text, ...]:
    found = one.figures
    if not found:
        return (one.name, *("-" for _ in _COLUMNS[2:]), Text("no end", style="bold red"))
    return (
        one.name,
        _change(found, "heldout_sampled"),
        _number(found["heldout_sampled_gain"]),
        _change(found, "heldout_greedy"),
        _change(found, "tool_call_rate"),
        f"{found['num_train_steps'] or 0:.0f}",
        f"{found['wall_s'] or 0:.0f}",
        Text("hold", style="green") if one.holds else Text("FAIL", style="bold red"),
    )


def _change(found: Mapping[str, float | None], name: str) -> str:
    return f"{_number(found[f'{name}_before'])} -> {_number(found[f'{name}_after'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
