"""The interface of the queue's stores, and the facts that a store keeps of a group.

There are two implementations: `memory_store` (readable, not durable) and `redis_store`. The same
tests run on both. Every request is atomic; expired leases are taken back before it.

A group's states in the ledger:

    offered -> leased -> unscored -> scored -> training -> trained -> consumed
           |          |           |          |          |
           +----------+-----------+----------+----------+-> dropped(reason)

A group holds a credit from `leased` to `training`. Evaluation groups skip `unscored`: after play
they are `scored`, ready for the trainer, and `training` while it has them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dialoop.v1 import trajectory_pb2
from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Mapping

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on attempts, deliveries, dead letters and leases.

    lease_s: default duration of a lease. max_lease_bytes: size of all groups of one lease call.
    """

    max_attempts: int = 3
    max_deliveries: int = 3
    max_dead_letters: int = 1000
    lease_s: float = 600.0
    max_lease_bytes: int = 1 << 40


class QueueStore(Protocol):
    """The queue's state; requests of dialoop.v1.ReplayService read and change it."""

    @property
    def limits(self) -> QueueLimits:
        """Return the store's limits."""
        ...

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a validated request as the proto says; `answer` is the class of its response.

        apply(pb.ExtendRequest(run="r", lease_ids=["task/1/a"], lease_s=60), pb.ExtendResponse)
        """
        ...

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that the servicer rejected before they reached the store."""
        ...

    async def check(self) -> None:
        """Raise Unavailable (STORE_UNAVAILABLE) when the store cannot be reached."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The facts that the ledger keeps of a group.

    `digest` covers the fields that scoring does not change. `versions` has, for each lineage that
    tokens were sampled in, the oldest and the newest policy version.
    """

    group_id: str
    task_id: str
    num_trajectories: int
    digest: str
    versions: Mapping[str, tuple[int, int]]


def group_facts(group: trajectory_pb2.Group) -> GroupFacts:
    """Return the facts that the ledger keeps of a group."""
    return GroupFacts(
        group_id=group.group_id,
        task_id=group.task.task_id,
        num_trajectories=len(group.trajectories),
        digest=_digest(group),
        versions=_versions(group),
    )


def _digest(group: trajectory_pb2.Group) -> str:
    bare = trajectory_pb2.Group()
    bare.CopyFrom(group)
    for trajectory in bare.trajectories:
        for turn in trajectory.turns:
            turn.ClearField("rewards")
        for sequence in trajectory.sequences:
            sequence.ClearField("ref_logprobs")
            sequence.ClearField("advantage")
            sequence.ClearField("token_advantages")
    return hashlib.blake2b(bare.SerializeToString(deterministic=True), digest_size=16).hexdigest()


def _versions(group: trajectory_pb2.Group) -> dict[str, tuple[int, int]]:
    numbers: dict[str, list[int]] = {}
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            for segment in sequence.segments:
                if segment.HasField("policy_version"):
                    version = segment.policy_version
                    numbers.setdefault(version.lineage, []).append(version.number)
    return {lineage: (min(all_), max(all_)) for lineage, all_ in sorted(numbers.items())}
