"""What a store of the queue does, and the values that go in and out.

Two implementations: `memory_store` (the readable one, not durable) and `redis_store`. One
congruence suite runs on both. Every method is atomic; leases that ran out are taken back first.

A group's way through the ledger (`State`):

    offered -> leased -> unscored -> scored -> training -> trained -> consumed
           |          |           |          |          |
           +----------+-----------+----------+----------+-> dropped(reason)

A credit is held from `leased` to `training`. Evaluation groups skip `unscored`: once played they
stand in `scored`, ready for the trainer, and in `training` while it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage

DEAD_LETTER = "dead_letter"
DEAD_LETTER_FORGOTTEN = "dead_letter_forgotten"
STALE = "stale"
LEASE_EXPIRED = "lease_expired"
MEMBER_RETRIED = "member_retried"


class State(StrEnum):
    """Where a task and its group stand."""

    OFFERED = "offered"
    LEASED = "leased"
    UNSCORED = "unscored"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    CONSUMED = "consumed"
    DROPPED = "dropped"


OUTSTANDING = (State.LEASED, State.UNSCORED, State.SCORED, State.TRAINING)
FINAL = frozenset({State.CONSUMED, State.DROPPED})


class EmptyReason(IntEnum):
    """Why a lease call gave nothing; the numbers are those of the proto."""

    NOT_EMPTY = 1
    NO_TASKS = 2
    NO_CREDITS = 3
    NO_GROUPS = 4
    TOO_FEW = 5
    NO_POLICY = 6


class AppendStatus(IntEnum):
    """What became of an appended group."""

    APPENDED = 1
    DUPLICATE = 2
    REJECTED = 3


class Outcome(IntEnum):
    """What the holder of a lease did with the group."""

    CONSUMED = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to give up, how much of that to keep, and how long a lease runs when nobody says."""

    max_attempts: int = 3
    max_deliveries: int = 3
    max_dead_letters: int = 1000
    lease_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTask:
    """A task for the ledger; `payload` is its serialised message."""

    task_id: str
    purpose: Purpose
    num_trajectories: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorMove:
    """Compare-and-set of the data position."""

    expected: str
    next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """How many tasks were new, and the data position afterwards."""

    num_new: int
    num_known: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """A task somebody may play until the lease runs out."""

    lease_id: str
    attempt: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLeases:
    """Leased tasks, or why there are none."""

    leases: tuple[TaskLease, ...]
    empty_reason: EmptyReason
    credits: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Oldest and newest policy version of a lineage in a group."""

    lineage: str
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A valid group to append.

    `digest` covers what scoring does not change; `num_discarded` trajectories were played under the
    same task lease before their member was played again.
    """

    group_id: str
    task_id: str
    lease_id: str
    num_trajectories: int
    digest: str
    versions: tuple[VersionSpan, ...]
    payload: bytes
    num_discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What became of one group, and why it was rejected."""

    status: AppendStatus
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """Which groups a worker wants: none below `min_groups`, and no more than fit `max_bytes`."""

    stage: Stage
    worker: str
    max_groups: int
    min_groups: int = 1
    lease_s: float
    max_staleness: int | None = None
    task_id_prefix: str = ""
    max_bytes: int = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """A group somebody works on until the lease runs out."""

    lease_id: str
    num_deliveries: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLeases:
    """Leased groups, or why there are none; `num_ready` more are waiting."""

    leases: tuple[GroupLease, ...]
    empty_reason: EmptyReason
    num_ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """Groups of leases that were taken earlier; none when any lease is lost."""

    leases: tuple[GroupLease, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """The work under a lease is done; `reason` is a drop's."""

    lease_id: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """The work under a lease is not done; `num_trajectories` were played for nothing.

    A group that is `set_aside` is delivered no more: it becomes a dead letter.
    """

    lease_id: str
    reason: str
    num_trajectories: int = 0
    failed: bool = False
    set_aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """How many leases went back, and how many tasks and groups were given up."""

    num_returned: int
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The ledger of one purpose, in groups and in trajectories."""

    groups: Mapping[State, int] = field(default_factory=dict)
    groups_dropped: Mapping[str, int] = field(default_factory=dict)
    num_trajectories_generated: int = 0
    num_trajectories_consumed: int = 0
    num_trajectories_live: int = 0
    trajectories_dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The whole ledger at one moment."""

    training: Counts
    evaluation: Counts
    policy_version: PolicyVersion | None
    max_outstanding_groups: int
    credits: int
    num_redelivered: int
    num_dead_letters: int
    num_duplicate_appends: int
    num_rejected_appends: int
    cursor: str
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that was delivered too often, and why the last delivery failed."""

    group_id: str
    stage: Stage
    reason: str
    num_deliveries: int
    payload: bytes


class Store(Protocol):
    """The queue's state and its transitions; see the proto for each one's meaning."""

    async def offer_tasks(
        self, run: str, tasks: Sequence[OfferedTask], cursor: CursorMove | None
    ) -> Offered:
        """Add unknown tasks; Busy (CURSOR_MOVED) changes nothing."""
        ...

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float
    ) -> TaskLeases:
        """Evaluation tasks first, then training tasks against credits."""
        ...

    async def append_groups(
        self, run: str, stage: Stage, groups: Sequence[NewGroup]
    ) -> tuple[Appended, ...]:
        """Take each group in, once, under its lease."""
        ...

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that were turned away before they came here."""
        ...

    async def lease_groups(self, run: str, query: GroupQuery) -> GroupLeases:
        """Distinct groups, oldest first; too stale ones are dropped on the way.

        CapacityExhausted (TOO_LARGE) when `min_groups` groups never fit `max_bytes`.
        """
        ...

    async def acknowledge(self, run: str, items: Sequence[Acknowledgement]) -> tuple[str, ...]:
        """Per item empty if acknowledged (also before), else the reason it was not."""
        ...

    async def give_back(self, run: str, items: Sequence[GivenBack]) -> Returned:
        """Re-issue tasks as a new attempt and redeliver groups; lost leases count nothing."""
        ...

    async def extend(self, run: str, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """Move the deadlines to `lease_s` from now; returns the leases that are lost."""
        ...

    async def leases_of(self, run: str, stage: Stage, worker: str) -> tuple[str, ...]:
        """The leases that a worker holds in a stage, oldest group first."""
        ...

    async def reopen(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float, max_bytes: int = 1 << 40
    ) -> Reopened:
        """The groups of these leases once more, held for `lease_s` from now; all or none.

        CapacityExhausted (TOO_LARGE) when they do not fit `max_bytes`.
        """
        ...

    async def advance_policy(
        self,
        run: str,
        version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str],
        max_outstanding_groups: int,
    ) -> int:
        """Announce a version; returns the credits. PreconditionFailed (VERSION_NOT_NEWER)."""
        ...

    async def stats(self, run: str) -> Stats:
        """Exact counts."""
        ...

    async def peek(self, run: str, stage: Stage, max_groups: int) -> tuple[bytes, ...]:
        """The groups that would be leased next."""
        ...

    async def dead_letters(self, run: str, max_groups: int) -> tuple[DeadLetter, ...]:
        """Oldest first."""
        ...

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """Put dead letters back as if never delivered; NotFound (GROUP_NOT_FOUND) moves none."""
        ...

    async def purge(self, run: str) -> None:
        """Forget the run."""
        ...

    async def check(self) -> None:
        """Unavailable (STORE_UNAVAILABLE) when the store cannot be reached."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
