"""Turn the results of `make learn` into rows of a table and of summary.json."""

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
    """The result of a config. `start`: run id of the demo it started from; empty without one.

    `figures` are taken from the run's summary; they are empty for a run that did not end.
    """

    name: str
    seed: int
    start: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    gates: Mapping[str, bool] = field(default_factory=dict)
    load: float = 0.0
    """Load average of the machine over the last minute, as in os.getloadavg."""

    @classmethod
    def of(cls, name: str, summary: Mapping[str, Any] | None, *, start: str, seed: int) -> Self:
        """Return the result of a run from its summary, or from None where it left none."""
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
        """Return whether the run ended and all its gates hold."""
        return bool(self.gates) and all(self.gates.values())


def kept_outcomes(
    path: Path, new: Sequence[AlgorithmResult], *, start: str
) -> list[AlgorithmResult]:
    """Return results of an earlier summary from the same warm start that no new one replaces."""
    if not path.is_file():
        return []
    rows = json.loads(path.read_text("utf-8"))["runs"]
    replaced = {(outcome.name, outcome.seed) for outcome in new}
    earlier = [AlgorithmResult(**row) for row in rows]
    return [o for o in earlier if (o.name, o.seed) not in replaced and o.start in ("", start)]


def table_of(outcomes: Iterable[AlgorithmResult]) -> Table:
    """Return a table with a line per config: held-out shares before and after training."""
    title = "Held-out accuracy and tool calls, before and after training"
    table = Table(*_COLUMNS, title=title, box=None, padding=(0, 2, 0, 0))
    for column in table.columns[:-1]:
        column.no_wrap = True  # eighty columns hold it
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    return table


def failures_of(outcomes: Iterable[AlgorithmResult]) -> list[str]:
    """Return one line for each gate that does not hold."""
    return [
        f"{outcome.name}, seed {outcome.seed}: {gate}"
        for outcome in outcomes
        for gate, holds in outcome.gates.items()
        if not holds
    ]


def _cells(outcome: AlgorithmResult) -> tuple[str | Text, ...]:
    figures = outcome.figures
    if not figures:
        return (outcome.name, *("-" for _ in _COLUMNS[2:]), Text("no end", style="bold red"))
    return (
        outcome.name,
        _change(figures, "heldout_sampled"),
        _number(figures["heldout_sampled_gain"]),
        _change(figures, "heldout_greedy"),
        _change(figures, "tool_call_rate"),
        f"{figures['num_train_steps'] or 0:.0f}",
        f"{figures['wall_s'] or 0:.0f}",
        Text("hold", style="green") if outcome.holds else Text("FAIL", style="bold red"),
    )


def _change(figures: Mapping[str, float | None], name: str) -> str:
    return f"{_number(figures[f'{name}_before'])} -> {_number(figures[f'{name}_after'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
