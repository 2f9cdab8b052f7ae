"""The interface of the queue's stores, and the facts that a store keeps of members and groups.

`redis_store` is the queue; the tests compare it with a readable model of it. Every request is
atomic; expired leases are taken back before it.

The ledger's unit is the member: one trajectory of a task's group. A member is open, finished (its
trajectory is in the queue) or given up (after `max_attempts` failed attempts). A task lease is for
the open members of one task. The group closes when no member is open: it is whole; short, where the
task allows that; or dropped (`close` in `redis_store/scripts/ledger.lua`). A group's states:

    offered <-> leased -> unscored -> scored -> training -> trained -> consumed
       |          |          |          |          |
       +----------+----------+----------+----------+-> dropped(reason)

A group holds a credit from `leased` to `training`. Evaluation groups skip `unscored`: after play
they are `scored`, ready for the trainer, and `training` while it has them. A group has the name of
its task, so a task that is played again after a loss gives a group of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from dialoop.v1 import trajectory_pb2 as pb
from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_services.config.tables import Overflow

Answer = TypeVar("Answer", bound=Message)

# What scoring may change, besides rewards and advantages.
_SCORED_COLUMNS = frozenset(("ref_logprobs", "token_advantages", "teacher_logprobs"))
# Hexadecimal digits of the two digests.
_KEPT, _WHOLE = 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on attempts, deliveries, dead letters, leases and what is remembered.

    max_attempts: failed attempts at a member before it is given up. lease_s: default duration of a
    lease. max_lease_bytes: size of all groups of one lease call, and of one group.
    max_finished: consumed and dropped tasks that the ledger remembers. full_at: share of the memory
    that Redis may use (maxmemory) above which it takes no new work.
    max_waiting_groups: training groups that may be unscored or scored, 0 for no bound; `overflow`:
    what happens to one more. Groups that are delivered again or requeued may exceed it.
    """

    max_attempts: int = 3
    max_deliveries: int = 3
    max_dead_letters: int = 1000
    lease_s: float = 600.0
    max_lease_bytes: int = 1 << 40
    max_finished: int = 10_000
    full_at: float = 0.8
    max_waiting_groups: int = 0
    overflow: Overflow = "block"


class QueueStore(Protocol):
    """The queue's state; requests of dialoop.v1.ReplayService read and change it."""

    @property
    def limits(self) -> QueueLimits:
        """Return the store's limits."""

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a validated request as the proto says; `answer` is the class of its response.

        apply(pb.ExtendRequest(run="r", lease_ids=["task/1/a"], lease_s=60), pb.ExtendResponse)
        """

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that the servicer rejected before they reached the store."""

    async def check(self) -> None:
        """Raise Unavailable (STORE_UNAVAILABLE) when the store cannot be reached."""

    async def close(self) -> None:
        """Close the connections."""


class Kind(StrEnum):
    """What is leased: a task, or a group in one of the stages."""

    TASK = "task"
    UNSCORED = "unscored"
    SCORED = "scored"
    EVALUATION = "evaluation"


_KINDS = {str(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseName:
    """The parts of a lease id."""

    kind: Kind
    task_id: str


def parse_lease(lease_id: str) -> LeaseName | None:
    """Return the kind and task of a lease, "<kind>/<token>/<task_id>"; None for other text.

    parse_lease("scored/1700000000000001/arithmetic/0").task_id  # "arithmetic/0"
    """
    name, _, rest = lease_id.partition("/")
    token, slash, task_id = rest.partition("/")
    kind = _KINDS.get(name)
    if kind is None or not token.isdigit() or not slash:
        return None
    return LeaseName(kind=kind, task_id=task_id)


class MemberFacts(NamedTuple):
    """The facts that the ledger keeps of a finished member.

    `digest` has two parts, "kept.whole": of what scoring keeps, and of all. `versions` has
    the oldest and the newest policy version of each lineage that tokens were sampled in.
    """

    digest: str
    versions: Mapping[str, tuple[int, int]]
    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The facts that the ledger compares of a scored group.

    `digest` joins those of its members, without what scoring may change.
    """

    group_id: str
    digest: str


def group_head(task: pb.Task) -> bytes:
    """Return the beginning of a serialised group: its name and task; members follow it.

    Protobuf reads serialised messages that follow each other as one.
    """
    head = pb.Group()
    head.group_id = task.task_id
    head.task.CopyFrom(task)
    return head.SerializeToString()


def pack_member(trajectory: pb.Trajectory) -> tuple[MemberFacts, bytes]:
    """Return what the ledger keeps of a trajectory, and its bytes as part of a serialised group."""
    versions: dict[str, tuple[int, int]] = {}
    for sequence in trajectory.sequences:
        for version in sequence.policy_versions:
            number = version.number
            low, high = versions.get(version.lineage, (number, number))
            versions[version.lineage] = min(low, number), max(high, number)
    part = pb.Group()
    part.trajectories.append(trajectory)
    raw = part.SerializeToString(deterministic=True)
    whole = sha256(raw).hexdigest()[:_WHOLE]
    digest = f"{_digest_without_scores(trajectory)}.{whole}"
    return MemberFacts(digest, versions, trajectory.trajectory_id), raw


def pack_group(group: pb.Group) -> tuple[GroupFacts, bytes]:
    """Return the facts that the ledger compares of a scored group, and the group's bytes."""
    digest = ",".join(map(_digest_without_scores, group.trajectories))
    facts = GroupFacts(group_id=group.group_id, digest=digest)
    return facts, group.SerializeToString(deterministic=True)


def _digest_without_scores(trajectory: pb.Trajectory) -> str:
    kept = pb.Trajectory()
    kept.CopyFrom(trajectory)
    for turn in kept.turns:
        turn.ClearField("rewards")
    for sequence in kept.sequences:
        sequence.ClearField("advantage")
        for place in reversed(range(len(sequence.columns))):
            if sequence.columns[place].name in _SCORED_COLUMNS:
                del sequence.columns[place]
    return sha256(kept.SerializeToString(deterministic=True)).hexdigest()[:_KEPT]
