"""What the replay service's answers hold: leases, outcomes, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from dialoop.wire import policy_version_from_proto

if TYPE_CHECKING:
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Group, Stage, Task
    from dialoop.v1 import replay_service_pb2 as pb


class EmptyReason(IntEnum):
    """Why a lease came back with nothing, or less than was asked for."""

    NOT_EMPTY = 1
    NO_TASKS = 2
    NO_CREDITS = 3
    NO_GROUPS = 4
    TOO_FEW = 5
    NO_POLICY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What an offer changed; `cursor` is the data position now."""

    num_new: int
    num_known: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """A task to play; name its group `group_id`."""

    lease_id: str
    task: Task
    attempt: int
    expires_in_s: float

    @property
    def group_id(self) -> str:
        """`<task_id>#<attempt>`."""
        return f"{self.task.task_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTasks:
    """Leased tasks, or why there are none."""

    leases: tuple[TaskLease, ...]
    empty_reason: EmptyReason
    credits: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    """A group and the lease it was made under; `num_discarded` members were played again."""

    group: Group
    lease_id: str
    num_discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What became of an append; `reason` is empty unless it was rejected."""

    is_duplicate: bool
    is_rejected: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """A group to score, train or read."""

    lease_id: str
    group: Group
    num_deliveries: int
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGroups:
    """Leased groups, or why there are none."""

    leases: tuple[GroupLease, ...]
    empty_reason: EmptyReason
    num_ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedLeases:
    """The groups of leases that were taken earlier; none of them when any is lost."""

    leases: tuple[GroupLease, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnItem:
    """A lease given back; `num_trajectories` were played under it and are thrown away.

    `failed` counts towards the limit of attempts; `set_aside` makes a group a dead letter at once.
    """

    lease_id: str
    reason: str
    num_trajectories: int = 0
    failed: bool = False
    set_aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """How many leases went back, and how many tasks or groups were given up for good."""

    num_returned: int
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Counts of one purpose. Trajectories: generated = consumed + dropped + live."""

    num_tasks_offered: int
    num_groups_leased: int
    num_groups_unscored: int
    num_groups_scored: int
    num_groups_training: int
    num_groups_trained: int
    num_groups_consumed: int
    num_trajectories_generated: int
    num_trajectories_consumed: int
    num_trajectories_live: int
    num_groups_dropped: dict[str, int] = field(default_factory=dict)
    num_trajectories_dropped: dict[str, int] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Tasks and groups that are neither consumed nor dropped."""
        return (
            self.num_tasks_offered
            + self.num_groups_leased
            + self.num_groups_unscored
            + self.num_groups_scored
            + self.num_groups_training
            + self.num_groups_trained
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """The state of a run's ledger."""

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
    """A group that was delivered too often without being acknowledged."""

    group_id: str
    stage: Stage
    reason: str
    num_deliveries: int
    group: Group


def stats_from_proto(proto: pb.ReplayStats) -> ReplayStats:
    """The ledger's counts."""
    has_version = proto.HasField("policy_version")
    return ReplayStats(
        training=_counts_from_proto(proto.training),
        evaluation=_counts_from_proto(proto.evaluation),
        policy_version=policy_version_from_proto(proto.policy_version) if has_version else None,
        max_outstanding_groups=proto.max_outstanding_groups,
        credits=proto.credits,
        num_redelivered=proto.num_redelivered,
        num_dead_letters=proto.num_dead_letters,
        num_duplicate_appends=proto.num_duplicate_appends,
        num_rejected_appends=proto.num_rejected_appends,
        cursor=proto.cursor,
        store=proto.store,
    )


def _counts_from_proto(proto: pb.LedgerCounts) -> LedgerCounts:
    return LedgerCounts(
        num_tasks_offered=proto.num_tasks_offered,
        num_groups_leased=proto.num_groups_leased,
        num_groups_unscored=proto.num_groups_unscored,
        num_groups_scored=proto.num_groups_scored,
        num_groups_training=proto.num_groups_training,
        num_groups_trained=proto.num_groups_trained,
        num_groups_consumed=proto.num_groups_consumed,
        num_trajectories_generated=proto.num_trajectories_generated,
        num_trajectories_consumed=proto.num_trajectories_consumed,
        num_trajectories_live=proto.num_trajectories_live,
        num_groups_dropped=dict(proto.num_groups_dropped),
        num_trajectories_dropped=dict(proto.num_trajectories_dropped),
    )
