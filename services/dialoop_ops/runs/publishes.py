"""The policies that a run published: when, how large, how long it took, and what proved them.

`publishes_of(index)` reads them from the rows `publish` of metrics.jsonl, and looks which of them
are still on disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dialoop_ops.runs.index import Point, RunIndex
from dialoop_ops.runs.policies import versions_in
from dialoop_ops.runs.run_config import flat_config

_NUMBERS = ("publish_s", "max_logprob_difference", "num_replicas", "num_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A publish. Numbers that its row lacks are None; one that is not finite is NaN.

    max_logprob_difference: the proof, the largest difference in nats between the trainer's and any
    replica's log-probs of the probe prompts. publish_s: until the last replica had the weights.
    is_on_disk: `dialoop export` can still write it.
    """

    time: float
    train_step: int
    lineage: str
    policy_version: int | None
    publish_s: float | None
    max_logprob_difference: float | None
    num_replicas: float | None
    num_bytes: float | None
    is_on_disk: bool


def publishes_of(index: RunIndex) -> tuple[Publish, ...]:
    """Return the publishes in the order of writing, without those that a restore discarded."""
    heads: dict[int, Point] = {}
    values: dict[int, dict[str, float]] = {}
    for name in _NUMBERS:
        for point in index.points(f"publish/{name}"):
            heads[point.row] = point
            values.setdefault(point.row, {})[name] = point.value
    on_disk = versions_in(index.run_dir / "policies")
    return tuple(
        Publish(
            time=head.time,
            train_step=head.train_step,
            lineage=head.lineage or "",
            policy_version=head.policy_version,
            is_on_disk=f"{head.lineage}-{head.policy_version}" in on_disk,
            **{name: values[row].get(name) for name in _NUMBERS},
        )
        for row, head in sorted(heads.items())
    )


def proof_bound(index: RunIndex) -> float | None:
    """Return the largest difference in nats that the run's gate allows; None where it has none."""
    text = flat_config(index.run_dir).get("gates.logprob_difference_at_most", "null")
    bound = json.loads(text)
    return None if bound is None else float(bound)
