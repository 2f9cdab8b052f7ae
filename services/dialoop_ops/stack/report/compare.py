"""Compare finished runs: means over seeds with intervals, and differences of variants.

Runs whose configs differ in `seed`, `run` and `[ports]` alone are the seeds of one variant. The
first variant is the baseline. A difference is paired by seed where both variants ran the same seeds
(two or more), else it is Welch's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dialoop.errors import NotFound
from dialoop.reasons import Reason
from rich.table import Table

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.runs.intervals import (
    Interval,
    difference_of,
    difference_of_shares,
    gain_of,
    mean_of,
    paired_difference,
    share_of,
)
from dialoop_ops.runs.run_config import compare_configs, find_run, settings_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

FIGURES = (
    "heldout_greedy_before",
    "heldout_greedy_after",
    "heldout_sampled_before",
    "heldout_sampled_after",
    "heldout_sampled_gain",
    "tool_call_rate_after",
    "num_train_steps",
    "num_trained_tokens",
    "wall_s",
    "cpu_s",
)
"""Figures of summary.json that are compared."""
_SHARES = ("heldout_greedy", "heldout_sampled", "tool_call_rate")
"""How names of figures begin that are shares, or mean rewards: those may lie between 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Runs with one config, `#1` the first. `settings`: what another variant has otherwise."""

    name: str
    runs: tuple[str, ...]
    settings: Mapping[str, str]
    by_seed: Mapping[str, Mapping[str, float]]
    """Figure -> seed -> value; figures that a run does not have are left out."""
    num_tasks: int = 0
    """Held-out tasks of each run; 0: unknown."""

    def mean(self, figure: str) -> Interval | None:
        """Return the figure's mean over the seeds; None where no run has it.

        The interval of shares, and of rewards between 0 and 1, stays there.
        """
        values = list(self.by_seed.get(figure, {}).values())
        if not values or not _are_shares(figure, values):
            return mean_of(values) if values else None
        of = gain_of if figure.endswith("_gain") else share_of
        return of(values, num_trials=len(values) * self.num_tasks)

    def minus(self, baseline: Variant, figure: str) -> Interval | None:
        """Return by how much the figure's mean is above the baseline's."""
        own, other = self.by_seed.get(figure, {}), baseline.by_seed.get(figure, {})
        if not own or not other:
            return None
        bounded = not figure.endswith("_gain") and _are_shares(
            figure, (*own.values(), *other.values())
        )
        if len(own) > 1 and own.keys() == other.keys():
            if bounded:
                return gain_of(
                    [own[seed] - other[seed] for seed in own],
                    num_trials=len(own) * self.num_tasks,
                )
            return paired_difference(own, other)
        means = self.mean(figure), baseline.mean(figure)
        if bounded and means[0] is not None and means[1] is not None:
            return difference_of_shares(means[0], means[1])
        return difference_of(list(own.values()), list(other.values()))


def variants_of(run_dirs: Sequence[Path]) -> tuple[Variant, ...]:
    """Return the variants in the order of their first runs.

    Raises NotFound (RUN_NOT_FOUND) for a run that has not ended, and for what is no run.
    """
    summaries = [_summary_of(run_dir) for run_dir in run_dirs]
    configs = [settings_of(run_dir) for run_dir in run_dirs]
    num_tasks = [int(config.get("evaluation.num_tasks", 0)) for config in configs]
    differing = [line.key for line in compare_configs(configs) if line.differs]
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, config in enumerate(configs):
        settings = tuple((key, config.get(key, "-")) for key in differing)
        groups.setdefault(settings, []).append(number)
    return tuple(
        Variant(
            name=f"#{place}",
            runs=tuple(run_dirs[number].name for number in numbers),
            settings=dict(settings),
            by_seed=_figures([summaries[number] for number in numbers]),
            num_tasks=num_tasks[numbers[0]],
        )
        for place, (settings, numbers) in enumerate(groups.items(), start=1)
    )


def _are_shares(figure: str, values: Iterable[float]) -> bool:
    least = -1 if figure.endswith("_gain") else 0
    return figure.startswith(_SHARES) and all(least <= value <= 1 for value in values)


def compare(run_dirs: Sequence[Path], console: Console) -> None:
    """Print the comparison as tables."""
    variants = variants_of(run_dirs)
    for variant in variants:
        changed = ", ".join(f"{key} = {value}" for key, value in variant.settings.items())
        console.print(f"{variant.name}: {', '.join(variant.runs)}", soft_wrap=True)
        if changed:
            console.print(f"  {changed}", soft_wrap=True, highlight=False)
    table = Table("", *(variant.name for variant in variants), box=None, padding=(0, 2, 0, 0))
    baseline, *others = variants
    for other in others:
        table.add_column(f"{other.name} - {baseline.name}")
    for figure in FIGURES:
        cells = [variant.mean(figure) for variant in variants]
        cells += [other.minus(baseline, figure) for other in others]
        if any(cells):
            table.add_row(figure, *("-" if cell is None else str(cell) for cell in cells))
    console.print(table)
    console.print(
        "Means with 95 % confidence intervals over seeds, by Student's t; those of shares are "
        "Wilson's and Newcombe's, and stay within 0 to 1."
    )


def as_json(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the comparison as `--json` prints it."""
    variants = variants_of(run_dirs)
    baseline, *others = variants
    return {
        "variants": [
            asdict(variant) | {"means": _numbers({name: variant.mean(name) for name in FIGURES})}
            for variant in variants
        ],
        "differences": [
            {"of": other.name, "minus": baseline.name}
            | _numbers({name: other.minus(baseline, name) for name in FIGURES})
            for other in others
        ],
    }


def _numbers(intervals: Mapping[str, Interval | None]) -> dict[str, Any]:
    return {name: asdict(value) for name, value in intervals.items() if value is not None}


def _summary_of(run_dir: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
        summary["gates"], summary["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFound(
            f"{run_dir} is no run that has ended: it has no whole summary.json.",
            reason=Reason.RUN_NOT_FOUND,
            remedy="Wait for its end, or go on with it by `dialoop train`. `dialoop console` "
            "compares running ones.",
        ) from None
    return summary


def _figures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for summary in summaries:
        undecided = summary.get("undecided_evaluations", ())
        # before_greedy is heldout_greedy_before: too few of its episodes count.
        left_out = {"_".join(("heldout", *label.split("_")[::-1])) for label in undecided}
        for name in FIGURES:
            if summary.get(name) is not None and name not in left_out:
                figures.setdefault(name, {})[_key_of(summary, figures.get(name, {}))] = float(
                    summary[name]
                )
    return figures


def _key_of(summary: Mapping[str, Any], taken: Mapping[str, float]) -> str:
    """Return the run's seed, or its name too where another run had the same seed."""
    seed = str(summary["seed"])
    return seed if seed not in taken else f"{seed} ({summary['run']})"


def compare_runs(arguments: argparse.Namespace) -> int:
    """Do what `dialoop compare` says, and return 0."""
    run_dirs = [find_run(name, arguments.root) for name in arguments.runs]
    if arguments.json:
        say(json.dumps(as_json(run_dirs), indent=2))
    else:
        compare(run_dirs, rich_console())
    return 0
