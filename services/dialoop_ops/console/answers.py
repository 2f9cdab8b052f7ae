"""What the console says of a run, as values for JSON: routes send them, an export keeps them.

`series_of(index, "train/reward")` is a curve. `to_json` spells numbers that are not finite as the
texts "NaN", "Infinity" and "-Infinity", because JSON has none.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dialoop_ops.runs.index import Point, RunIndex
from dialoop_ops.runs.overview import EVALUATIONS, band_of
from dialoop_ops.runs.policies import proof_bound, publishes_of
from dialoop_ops.runs.run_config import read_run, settings_of
from dialoop_ops.runs.summaries import TrajectorySummary

_PER_STEP = "train/reward"
"""A number that each train step has."""
_LENGTHS = {"lengths/generated": 1, "lengths/trained": 2}
"""Mean sampled tokens of all trajectories of a train step, and of those that it trained; each with
its place in `RunIndex.trained_by_step`. If long ones are lost on the way, the second is lower."""
_THROUGHPUT = "throughput/trained_tokens_per_s"
"""Trained tokens per second of a train step, its wait and its publish, but of no more than the time
since the row of the step before: a publish may run beside other steps."""
_HELDOUT = {f"heldout/{name.split()[-1]}": labels for name, labels in EVALUATIONS.items()}
"""The evaluations before, while and after a run trained, as one curve each."""
_EVALUATION, _MEAN_REWARD, _NUM_TRAJECTORIES = "evaluation/", "mean_reward", "num_trajectories"


def describe_run(name: str, index: RunIndex) -> dict[str, Any]:
    """Return what a run is, and how far its index is."""
    facts = read_run(index.run_dir)
    return {
        "name": name,
        "path": str(index.run_dir),
        "run_id": facts.get("run_id", ""),
        "started": facts.get("started"),
        "variant": hashlib.sha256(to_json(settings_of(index.run_dir))).hexdigest()[:12],
        "progress": asdict(index.progress()),
    }


def describe_trajectory(summary: TrajectorySummary, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory without its tokens."""
    return {
        "summary": asdict(summary),
        **{k: v for k, v in row.items() if k != "sequences"},
        "sequences": [
            {
                "num_tokens": len(sequence["token_ids"]),
                "fork_cause": sequence.get("fork_cause", "NONE"),
                "advantage": sequence.get("advantage"),
            }
            for sequence in row["sequences"]
        ],
    }


def describe_publishes(index: RunIndex) -> dict[str, Any]:
    """Return the policies that a run published, and the bound of their proof."""
    rows = [asdict(publish) for publish in publishes_of(index)]
    return {"bound": proof_bound(index), "publishes": rows}


def series_of(index: RunIndex, name: str, *, has_samples: bool) -> dict[str, Any]:
    """Return a series as a column per number; `samples` counts the trajectories trained so far."""
    points = points_of(index, name)
    columns = ("time", "train_step", "policy_version", "value")
    values: dict[str, Any] = {c: [getattr(p, c) for p in points] for c in columns}
    if has_samples:
        values["samples"] = num_samples_of(index, points)
    values["low"], values["high"] = bands_of(index, name) or (None, None)
    return {"name": name, **values}


def names_of(index: RunIndex) -> list[str]:
    """Return the names of a run's curves: those of metrics.jsonl, and those made of them."""
    names = index.metric_names()
    made = (*_LENGTHS, _THROUGHPUT) if _PER_STEP in names else ()
    heldout = (
        name
        for name, labels in _HELDOUT.items()
        if any(f"{_EVALUATION}{label}/{_MEAN_REWARD}" in names for label in labels)
    )
    return sorted((*names, *made, *heldout))


def points_of(index: RunIndex, name: str) -> Sequence[Point]:
    """Return a curve's points: of metrics.jsonl, or made of those and of the trajectories."""
    if name in _LENGTHS:
        by_step = index.trained_by_step()
        lengths = {step: facts[_LENGTHS[name]] for step, facts in by_step.items()}
        return [
            replace(point, value=length)
            for point in index.points(_PER_STEP)
            if (length := lengths.get(point.train_step)) is not None
        ]
    if name in _HELDOUT:
        means = (f"{_EVALUATION}{label}/{_MEAN_REWARD}" for label in _HELDOUT[name])
        return [point for mean in means for point in index.points(mean)]
    if name == _THROUGHPUT:
        return _throughput_of(index)
    return index.points(name)


def _throughput_of(index: RunIndex) -> list[Point]:
    seconds: dict[int, float] = defaultdict(float)
    for part in ("lease", "rows", "train", "wait", "capture", "publish", "keep"):
        for point in index.points(f"train/{part}_s"):
            seconds[point.row] += point.value
    points = index.points("train/num_trained_tokens")
    for before, point in itertools.pairwise(points):
        seconds[point.row] = min(seconds[point.row], point.time - before.time)
    return [
        replace(point, value=point.value / seconds[point.row])
        for point in points
        if seconds[point.row] > 0
    ]


def bands_of(index: RunIndex, name: str) -> tuple[list[float | None], list[float | None]] | None:
    """Return the 95 % interval around each point of an evaluation's mean reward; None for others.

    `dialoop_ops.runs.overview.band_of` says which.
    """
    labels = _HELDOUT.get(name, ())
    if name.startswith(_EVALUATION) and name.endswith(f"/{_MEAN_REWARD}"):
        labels = (name[len(_EVALUATION) : -len(_MEAN_REWARD) - 1],)
    if not labels:
        return None
    counts = {
        point.row: point.value
        for label in labels
        for point in index.points(f"{_EVALUATION}{label}/{_NUM_TRAJECTORIES}")
    }
    bands = [band_of(point.value, counts.get(point.row, 0.0)) for point in points_of(index, name)]
    return [low for low, _ in bands], [high for _, high in bands]


def num_samples_of(index: RunIndex, points: Sequence[Point]) -> list[int]:
    """Return for each point how many trajectories were trained up to its train step."""
    by_step = sorted((step, count) for step, (count, *_) in index.trained_by_step().items())
    steps = [step for step, _ in by_step]
    sums = [0, *itertools.accumulate(count for _, count in by_step)]
    return [sums[bisect.bisect_right(steps, point.train_step)] for point in points]


def to_json(value: Any) -> bytes:
    """Return compact JSON in ASCII."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_spelled_out(value), separators=(",", ":")).encode()


def _spelled_out(value: Any) -> Any:
    """Return the value with numbers that are not finite as texts that JavaScript reads."""
    if isinstance(value, dict):
        return {key: _spelled_out(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled_out(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
