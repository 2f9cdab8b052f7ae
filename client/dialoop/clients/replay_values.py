"""What the replay queue hands out and takes in: leases, acknowledgements, the ledger's counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Group, Stage, Task


class EmptyReason(IntEnum):
    """Why a lease call gave nothing."""

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


class LeaseOutcome(IntEnum):
    """What the holder of a group lease did with the group."""

    CONSUMED = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """How many tasks were new, and the data position afterwards."""

    num_new: int
    num_known: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """A task to play until the lease runs out; attempt is 1 on first issue."""

    lease_id: str
    task: Task
    attempt: int
    expires_in_s: float

    @property
    def group_id(self) -> str:
        """The name its group must have: `arithmetic/train/0/35+40#1`."""
        return f"{self.task.task_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLeases:
    """Leased tasks, or why there are none."""

    leases: tuple[TaskLease, ...]
    empty_reason: EmptyReason
    credits: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """A group to work on until the lease runs out."""

    lease_id: str
    group: Group
    num_deliveries: int
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLeases:
    """Leased groups, or why there are none; `num_ready` more are waiting."""

    leases: tuple[GroupLease, ...]
    empty_reason: EmptyReason
    num_ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    """A group and the lease it was made under.

    `num_discarded` trajectories were played under the task lease before their member was replayed.
    """

    group: Group
    lease_id: str
    num_discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOutcome:
    """What became of one group; a duplicate is a success of an earlier call."""

    status: AppendStatus
    reason: str = ""
    message: str = ""

    @property
    def is_rejected(self) -> bool:
        """Whether nothing changed because the group is invalid or its lease lost."""
        return self.status is AppendStatus.REJECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnItem:
    """A lease given back undone; `num_trajectories` were played under it for nothing.

    A failed one counts towards the number of attempts after which the work is dropped.
    """

    lease_id: str
    reason: str
    num_trajectories: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """How many leases went back, and how many tasks and groups were given up."""

    num_returned: int
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The ledger of one purpose. Trajectories: generated = consumed + dropped + live."""

    num_tasks_offered: int = 0
    num_groups_leased: int = 0
    num_groups_unscored: int = 0
    num_groups_scored: int = 0
    num_groups_training: int = 0
    num_groups_trained: int = 0
    num_groups_consumed: int = 0
    num_groups_dropped: dict[str, int] = field(default_factory=dict)
    num_trajectories_generated: int = 0
    num_trajectories_consumed: int = 0
    num_trajectories_dropped: dict[str, int] = field(default_factory=dict)
    num_trajectories_live: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """The whole ledger of a run at one moment."""

    training: LedgerCounts
    evaluation: LedgerCounts
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
    group: Group
