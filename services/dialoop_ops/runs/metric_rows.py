"""Rows of metrics.jsonl: which of them count after a restore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

METRICS = "metrics.jsonl"
# Evaluations that take place once, so that a restore may have to repeat them.
_ONCE = ("before_", "after_")


def without_discards(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that count, without those of weights that a restore has discarded."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == "restore":
            kept = [earlier for earlier in kept if is_kept(earlier, row)]
        kept.append(row)
    return kept


def is_kept(row: Mapping[str, Any], restore: Mapping[str, Any]) -> bool:
    """Return whether the restored checkpoint contains the step of a row before the restore."""
    if row["kind"] == "warm_start":
        return bool(row["train_step"] <= restore["num_warm_start_steps"])
    again = row.get("label", "").startswith(_ONCE) and row["label"] not in restore["evaluations"]
    return bool(row["train_step"] <= restore["train_step"] and not again)
