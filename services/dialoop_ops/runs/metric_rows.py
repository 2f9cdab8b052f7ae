"""Rows of metrics.jsonl: which of them count after a restore, and the numbers they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

METRICS = "metrics.jsonl"
# Evaluations that take place once, so that a restore may have to repeat them.
_ONCE = ("before_", "after_")
_NO_SERIES = ("time", "train_step", "kind", "label")


def is_kept(row: Mapping[str, Any], restore: Mapping[str, Any]) -> bool:
    """Return whether the restored checkpoint contains the step of a row before the restore."""
    if row["kind"] == "warm_start":
        return bool(row["train_step"] <= restore["num_warm_start_steps"])
    again = row.get("label", "").startswith(_ONCE) and row["label"] not in restore["evaluations"]
    return bool(row["train_step"] <= restore["train_step"] and not again)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers as {"train/reward": 0.5, "train/by_staleness/0/ratio": 1.0}."""
    label = f"{row['kind']}/{row['label']}" if "label" in row else str(row["kind"])
    return dict(_numbers({k: v for k, v in row.items() if k not in _NO_SERIES}, label))


def _numbers(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if isinstance(value, dict):
            yield from _numbers(value, path)
        elif isinstance(value, (int, float)):
            yield path, float(value)
