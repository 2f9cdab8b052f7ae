"""What a store of the queue does, and what it keeps of a group.

Two implementations: `memory_store` (the readable one, not durable) and `redis_store`. One
congruence suite runs on both. Every request is atomic; leases that ran out are taken back first.

A group's way through the ledger:

    offered -> leased -> unscored -> scored -> training -> trained -> consumed
           |          |           |          |          |
           +----------+-----------+----------+----------+-> dropped(reason)

A credit is held from `leased` to `training`. Evaluation groups skip `unscored`: once played they
stand in `scored`, ready for the trainer, and in `training` while it has them.
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
    """When to give up, how much of that to keep, and the default and the size of a lease.

    lease_s: seconds a lease runs when nobody says. max_lease_bytes: groups handed out by one call.
    """

    max_attempts: int = 3
    max_deliveries: int = 3
    max_dead_letters: int = 1000
    lease_s: float = 600.0
    max_lease_bytes: int = 1 << 40


class QueueStore(Protocol):
    """The queue's state; every change to it is a request of dialoop.v1.ReplayService."""

    @property
    def limits(self) -> QueueLimits:
        """When the store gives up."""
        ...

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Do what a checked request asks, as the proto says; `answer` is its response's class.

        apply(pb.ExtendRequest(run="r", lease_ids=["task/1/a"], lease_s=60), pb.ExtendResponse)
        """
        ...

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that were turned away before they came here."""
        ...

    async def check(self) -> None:
        """Unavailable (STORE_UNAVAILABLE) when the store cannot be reached."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What the ledger knows of a group.

    `digest` covers what scoring does not change; `versions` has the oldest and newest policy
    version of each lineage that tokens were sampled under.
    """

    group_id: str
    task_id: str
    num_trajectories: int
    digest: str
    versions: Mapping[str, tuple[int, int]]


def group_facts(group: trajectory_pb2.Group) -> GroupFacts:
    """Read off a group what the ledger keeps of it."""
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
    return {lineage: (min(found), max(found)) for lineage, found in sorted(numbers.items())}
