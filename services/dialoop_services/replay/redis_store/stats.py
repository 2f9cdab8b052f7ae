"""Redis' counters back into `Stats`.

counts: {"1:unscored": "3", "1:dropped:stale": "2", "1:t:generated": "40", "redelivered": "1"}
"""

from __future__ import annotations

from collections.abc import Mapping

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose

from dialoop_services.replay.store import Counts, State, Stats


def decode_stats(
    *,
    counts: Mapping[str, str],
    meta: Mapping[str, str],
    credits: int,
    num_dead_letters: int,
    store: str,
) -> Stats:
    """The ledger as it stands in the counters."""
    version = None
    if "lineage" in meta:
        version = PolicyVersion(lineage=meta["lineage"], number=int(meta["number"]))
    return Stats(
        training=_counts(counts, Purpose.TRAINING),
        evaluation=_counts(counts, Purpose.EVALUATION),
        policy_version=version,
        max_outstanding_groups=int(meta.get("max_outstanding", 0)),
        credits=credits,
        num_redelivered=int(counts.get("redelivered", 0)),
        num_dead_letters=num_dead_letters,
        num_duplicate_appends=int(counts.get("duplicates", 0)),
        num_rejected_appends=int(counts.get("rejected", 0)),
        cursor=meta.get("cursor", ""),
        store=store,
    )


def _counts(counts: Mapping[str, str], purpose: Purpose) -> Counts:
    start = f"{int(purpose)}:"

    def number(field: str) -> int:
        return int(counts.get(start + field, 0))

    def by_reason(field: str) -> dict[str, int]:
        found = {
            name.removeprefix(start + field): int(value)
            for name, value in counts.items()
            if name.startswith(start + field)
        }
        return {reason: value for reason, value in found.items() if value}

    return Counts(
        groups={state: number(state) for state in State},
        groups_dropped=by_reason("dropped:"),
        num_trajectories_generated=number("t:generated"),
        num_trajectories_consumed=number("t:consumed"),
        num_trajectories_live=number("t:live"),
        trajectories_dropped=by_reason("t:dropped:"),
    )
