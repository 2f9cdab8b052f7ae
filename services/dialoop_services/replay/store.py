"""The interface of the queue's stores, and the facts that a store keeps of members and groups.

There are two implementations: `memory_store` (readable, not durable) and `redis_store`. The same
tests run on both. Every request is atomic; expired leases are taken back before it.

The ledger's unit is the member: one trajectory of a task's group. A member is open, finished (its
trajectory is in the queue) or given up (after `max_attempts` failed attempts). A task lease is for
the open members of one task. The group closes when no member is open (`memory_store/assembly.py`
has the rule). A group's states:

    offered <-> leased -> unscored -> scored -> training -> trained -> consumed
       |          |          |          |          |
       +----------+----------+----------+----------+-> dropped(reason)

A group holds a credit from `leased` to `training`. Evaluation groups skip `unscored`: after play
they are `scored`, ready for the trainer, and `training` while it has them. A group has the name of
its task, so a task that is played again after a loss gives a group of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from google.protobuf.message import Message

from dialoop_services.replay.serialised import (
    TRAJECTORIES,
    MemberSummary,
    digests_of,
    fields_in,
    number_of,
    summary_of,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop_services.config.tables import Overflow

Answer = TypeVar("Answer", bound=Message)

# Tags of messages inside a serialised one.
_LEASES = varint(number_of(pb.LeaseGroupsResponse, "leases") << 3 | 2)
_GROUP = varint(number_of(pb.GroupLease, "group") << 3 | 2)
_LEASE_ID = varint(number_of(pb.GroupLease, "lease_id") << 3 | 2)
_MEMBER = varint(TRAJECTORIES << 3 | 2)


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
        ...

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a validated request as the proto says; `answer` is the class of its response.

        apply(pb.ExtendRequest(run="r", lease_ids=["task/1/a"], lease_s=60), pb.ExtendResponse)
        """
        ...

    async def append_members(self, run: str, items: Sequence[FinishedMembers]) -> MembersAppended:
        """Apply an append of members, as `AppendMembers` in the proto says."""
        ...

    async def lease_groups(self, request: pb.LeaseGroupsRequest) -> GroupsHandedOut:
        """Apply a lease of groups, whose bytes stay as they were stored."""
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


class LeasedGroup(NamedTuple):
    """A lease of a group, and the bytes of the group in parts, as they were stored."""

    lease_id: str
    num_deliveries: int
    parts: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class GroupsHandedOut:
    """The answer to LeaseGroups, but for its leases, which last `lease_s`."""

    answer: pb.LeaseGroupsResponse
    lease_s: float
    leases: Sequence[LeasedGroup]

    def serialize(self) -> bytes:
        """Return the serialised answer; no group is parsed for it."""
        written: list[bytes] = []
        rests: dict[int, bytes] = {}
        for lease_id, num_deliveries, parts in self.leases:
            rest = rests.get(num_deliveries)
            if rest is None:
                bare = pb.GroupLease(num_deliveries=num_deliveries, expires_in_s=self.lease_s)
                rest = rests[num_deliveries] = bare.SerializeToString()
            name, size = lease_id.encode(), sum(map(len, parts))
            head = b"".join((_LEASE_ID, varint(len(name)), name, rest, _GROUP, varint(size)))
            written += (_LEASES, varint(len(head) + size), head, *parts)
        written.append(self.answer.SerializeToString())
        return b"".join(written)


@dataclass(frozen=True, slots=True)
class FinishedMembers:
    """Trajectories that were played under one lease: members `first`, `first` + 1, ... of a group.

    num_discarded: trajectories that the player gave up before these. summaries: those of the
    trajectories, where a check has read them.
    """

    lease_id: str
    first: int
    trajectories: Sequence[trajectory_pb2.Trajectory]
    num_discarded: int
    summaries: Sequence[MemberSummary] = ()

    def pack(self) -> list[tuple[MemberFacts, bytes]]:
        """Return the facts and the bytes of each member."""
        summaries = self.summaries or [summary_of(trajectory) for trajectory in self.trajectories]
        return [pack_member(*pair) for pair in zip(self.trajectories, summaries, strict=True)]

    @classmethod
    def of(cls, item: pb.MemberItem, summaries: Sequence[MemberSummary] = ()) -> FinishedMembers:
        """Return the one member of an item."""
        return cls(item.lease_id, item.member, [item.trajectory], item.num_discarded, summaries)


@dataclass(frozen=True, slots=True)
class MembersAppended:
    """What came of an append of members.

    reasons: for each member in order "" where it was appended, "DUPLICATE", or why it was not.
    num_overflowed: groups that were dropped for want of room, by reason.
    """

    reasons: Sequence[str]
    num_overflowed: Mapping[str, int]

    def response(self) -> pb.AppendMembersResponse:
        """Return the answer to AppendMembers."""
        return pb.AppendMembersResponse(
            outcomes=map(append_outcome, self.reasons), num_overflowed=self.num_overflowed
        )


class MemberFacts(NamedTuple):
    """The facts that the ledger keeps of a finished member.

    `digest` has two parts, "kept.scored": of what scoring keeps, and of what it may change, such as
    rewards. `versions` has, for each lineage that tokens were sampled in, the oldest and the newest
    policy version.
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


def group_head(task: trajectory_pb2.Task) -> bytes:
    """Return the beginning of a serialised group: its name and task; members follow it.

    Protobuf reads serialised messages that follow each other as one.
    """
    head = trajectory_pb2.Group()
    head.group_id = task.task_id
    head.task.CopyFrom(task)
    return head.SerializeToString()


def pack_member(
    trajectory: trajectory_pb2.Trajectory, summary: MemberSummary | None = None
) -> tuple[MemberFacts, bytes]:
    """Return what the ledger keeps of a trajectory, and its bytes as part of a serialised group."""
    raw = trajectory.SerializeToString(deterministic=True)
    summary = summary or summary_of(trajectory)
    digest = ".".join(digests_of(trajectory, raw, summary))
    facts = MemberFacts(digest, summary.versions, trajectory.trajectory_id)
    return facts, _MEMBER + varint(len(raw)) + raw


def pack_group(group: trajectory_pb2.Group) -> tuple[GroupFacts, bytes]:
    """Return the facts that the ledger compares of a scored group, and the group's bytes."""
    raw = group.SerializeToString(deterministic=True)
    places = (
        (value, end)
        for number, _, value, end in fields_in(raw, 0, len(raw))
        if number == TRAJECTORIES
    )
    digests = (
        digests_of(trajectory, raw[value:end])[0]
        for trajectory, (value, end) in zip(group.trajectories, places, strict=True)
    )
    return GroupFacts(group_id=group.group_id, digest=",".join(digests)), raw


def append_outcome(reason: str) -> pb.AppendOutcome:
    """Return the outcome of an append: no reason is appended, "DUPLICATE" was there before."""
    if not reason:
        return pb.AppendOutcome(status=pb.APPEND_STATUS_APPENDED)
    if reason == "DUPLICATE":
        return pb.AppendOutcome(status=pb.APPEND_STATUS_DUPLICATE)
    return pb.AppendOutcome(status=pb.APPEND_STATUS_REJECTED, reason=reason)


def digest_without_scores(member_digest: str) -> str:
    """Return the part of a member's digest that scoring does not change."""
    return member_digest.partition(".")[0]
