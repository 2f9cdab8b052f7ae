"""The queue's values as protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.wire import policy_version_to_proto

from dialoop_services.replay.queue import Verdict
from dialoop_services.replay.store import (
    Counts,
    DeadLetter,
    GroupLease,
    GroupLeases,
    Reopened,
    State,
    Stats,
    TaskLeases,
)


def task_leases(found: TaskLeases, lease_s: float) -> pb.LeaseTasksResponse:
    """Leased tasks, or why there are none."""
    return pb.LeaseTasksResponse(
        leases=[
            pb.TaskLease(
                lease_id=lease.lease_id,
                task=trajectory_pb2.Task.FromString(lease.payload),
                attempt=lease.attempt,
                expires_in_s=lease_s,
            )
            for lease in found.leases
        ],
        empty_reason=_number(found.empty_reason),
        credits=found.credits,
        cursor=found.cursor,
    )


def group_leases(found: GroupLeases, lease_s: float) -> pb.LeaseGroupsResponse:
    """Leased groups, or why there are none."""
    return pb.LeaseGroupsResponse(
        leases=_group_leases(found.leases, lease_s),
        empty_reason=_number(found.empty_reason),
        num_ready=found.num_ready,
    )


def reopened(found: Reopened, lease_s: float) -> pb.ReopenLeasesResponse:
    """Groups handed out once more, or the leases that are lost."""
    return pb.ReopenLeasesResponse(
        leases=_group_leases(found.leases, lease_s), lost_lease_ids=found.lost
    )


def _group_leases(leases: Iterable[GroupLease], lease_s: float) -> list[pb.GroupLease]:
    return [
        pb.GroupLease(
            lease_id=lease.lease_id,
            group=trajectory_pb2.Group.FromString(lease.payload),
            num_deliveries=lease.num_deliveries,
            expires_in_s=lease_s,
        )
        for lease in leases
    ]


def append_outcome(verdict: Verdict) -> pb.AppendOutcome:
    """What became of one group."""
    return pb.AppendOutcome(
        status=_number(verdict.status), reason=verdict.reason, message=verdict.message
    )


def dead_letter(letter: DeadLetter) -> pb.DeadLetter:
    """A group that was delivered too often."""
    return pb.DeadLetter(
        group_id=letter.group_id,
        stage=_number(letter.stage),
        reason=letter.reason,
        num_deliveries=letter.num_deliveries,
        group=trajectory_pb2.Group.FromString(letter.payload),
    )


def replay_stats(stats: Stats) -> pb.ReplayStats:
    """The whole ledger."""
    version = stats.policy_version
    return pb.ReplayStats(
        training=_counts(stats.training),
        evaluation=_counts(stats.evaluation),
        policy_version=policy_version_to_proto(version) if version is not None else None,
        max_outstanding_groups=stats.max_outstanding_groups,
        credits=stats.credits,
        num_redelivered=stats.num_redelivered,
        num_dead_letters=stats.num_dead_letters,
        num_duplicate_appends=stats.num_duplicate_appends,
        num_rejected_appends=stats.num_rejected_appends,
        cursor=stats.cursor,
        store=stats.store,
    )


def _counts(counts: Counts) -> pb.LedgerCounts:
    groups = counts.groups
    return pb.LedgerCounts(
        num_tasks_offered=groups[State.OFFERED],
        num_groups_leased=groups[State.LEASED],
        num_groups_unscored=groups[State.UNSCORED],
        num_groups_scored=groups[State.SCORED],
        num_groups_training=groups[State.TRAINING],
        num_groups_trained=groups[State.TRAINED],
        num_groups_consumed=groups[State.CONSUMED],
        num_groups_dropped=dict(counts.groups_dropped),
        num_trajectories_generated=counts.num_trajectories_generated,
        num_trajectories_consumed=counts.num_trajectories_consumed,
        num_trajectories_dropped=dict(counts.trajectories_dropped),
        num_trajectories_live=counts.num_trajectories_live,
    )


def _number(value: int) -> Any:
    """An enum's number: the stubs ask for enum classes that do not exist at run time."""
    return int(value)
