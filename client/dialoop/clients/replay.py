"""ReplayClient: the task ledger, groups and leases of a run, in domain types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Rpc
from dialoop.clients.replay_values import (
    AppendItem,
    AppendOutcome,
    AppendStatus,
    DeadLetter,
    EmptyReason,
    GroupLease,
    GroupLeases,
    LeaseOutcome,
    LedgerCounts,
    Offered,
    ReplayStats,
    Returned,
    ReturnItem,
    TaskLease,
    TaskLeases,
)
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.wire import (
    group_from_proto,
    group_to_proto,
    policy_version_from_proto,
    policy_version_to_proto,
    task_from_proto,
    task_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from dialoop.clients.channel import Channel
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Group, Task

__all__ = [
    "AppendItem",
    "AppendOutcome",
    "AppendStatus",
    "DeadLetter",
    "EmptyReason",
    "GroupLease",
    "GroupLeases",
    "LedgerCounts",
    "Offered",
    "ReplayClient",
    "ReplayStats",
    "ReturnItem",
    "Returned",
    "TaskLease",
    "TaskLeases",
]


def _rpc(name: str, request: type[Any], answer: type[Any]) -> Rpc[Any, Any]:
    # All are safe to repeat: ids make them idempotent, and a lease whose answer was lost runs out.
    return Rpc(f"/dialoop.v1.ReplayService/{name}", request, answer, is_retried=True)


OFFER_TASKS = _rpc("OfferTasks", pb.OfferTasksRequest, pb.OfferTasksResponse)
LEASE_TASKS = _rpc("LeaseTasks", pb.LeaseTasksRequest, pb.LeaseTasksResponse)
APPEND_GROUPS = _rpc("AppendGroups", pb.AppendGroupsRequest, pb.AppendGroupsResponse)
LEASE_GROUPS = _rpc("LeaseGroups", pb.LeaseGroupsRequest, pb.LeaseGroupsResponse)
ACKNOWLEDGE = _rpc("Acknowledge", pb.AcknowledgeRequest, pb.AcknowledgeResponse)
RETURN = _rpc("Return", pb.ReturnRequest, pb.ReturnResponse)
EXTEND = _rpc("Extend", pb.ExtendRequest, pb.ExtendResponse)
ADVANCE_POLICY = _rpc("AdvancePolicy", pb.AdvancePolicyRequest, pb.AdvancePolicyResponse)
WATCH = _rpc("Watch", pb.WatchRequest, pb.WatchResponse)
GET_STATS = _rpc("GetStats", pb.GetStatsRequest, pb.GetStatsResponse)
PEEK = _rpc("Peek", pb.PeekRequest, pb.PeekResponse)
LIST_DEAD_LETTERS = _rpc("ListDeadLetters", pb.ListDeadLettersRequest, pb.ListDeadLettersResponse)
REQUEUE = _rpc("Requeue", pb.RequeueRequest, pb.RequeueResponse)
PURGE = _rpc("Purge", pb.PurgeRequest, pb.PurgeResponse)


class ReplayClient:
    """Asks the replay queue; `run` scopes every call."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def offer_tasks(
        self, run: str, tasks: Iterable[Task], *, expected_cursor: str = "", next_cursor: str = ""
    ) -> Offered:
        """Add unknown tasks and move the data position; Busy (CURSOR_MOVED) changes nothing."""
        request = pb.OfferTasksRequest(
            run=run,
            tasks=[task_to_proto(task) for task in tasks],
            expected_cursor=expected_cursor,
            next_cursor=next_cursor,
        )
        answer = await self._channel.call(OFFER_TASKS, request)
        return Offered(num_new=answer.num_new, num_known=answer.num_known, cursor=answer.cursor)

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float, wait_s: float = 0.0
    ) -> TaskLeases:
        """Evaluation tasks first, then training tasks against credits; waits up to `wait_s`."""
        request = pb.LeaseTasksRequest(
            run=run, worker=worker, max_tasks=max_tasks, lease_s=lease_s, wait_s=wait_s
        )
        answer = await self._channel.call(LEASE_TASKS, request, deadline_s=_waiting(wait_s))
        leases = (
            TaskLease(
                lease_id=lease.lease_id,
                task=task_from_proto(lease.task),
                attempt=lease.attempt,
                expires_in_s=lease.expires_in_s,
            )
            for lease in answer.leases
        )
        return TaskLeases(
            leases=tuple(leases),
            empty_reason=EmptyReason(answer.empty_reason),
            credits=answer.credits,
            cursor=answer.cursor,
        )

    async def append_groups(
        self, run: str, stage: Stage, items: Iterable[AppendItem]
    ) -> tuple[AppendOutcome, ...]:
        """Hand groups in, each under its lease; one outcome per item."""
        request = pb.AppendGroupsRequest(
            run=run,
            stage=int(stage),  # type: ignore[arg-type]
            items=[
                pb.AppendItem(
                    group=group_to_proto(item.group),
                    lease_id=item.lease_id,
                    num_discarded=item.num_discarded,
                )
                for item in items
            ],
        )
        answer = await self._channel.call(APPEND_GROUPS, request)
        return tuple(
            AppendOutcome(status=AppendStatus(o.status), reason=o.reason, message=o.message)
            for o in answer.outcomes
        )

    async def append_group(
        self, run: str, stage: Stage, group: Group, *, lease_id: str, num_discarded: int = 0
    ) -> AppendOutcome:
        """Hand one group in under its lease."""
        item = AppendItem(group=group, lease_id=lease_id, num_discarded=num_discarded)
        (outcome,) = await self.append_groups(run, stage, [item])
        return outcome

    async def lease_groups(  # noqa: PLR0913 - the rpc has these fields
        self,
        run: str,
        stage: Stage,
        *,
        worker: str,
        max_groups: int,
        lease_s: float,
        min_groups: int = 1,
        wait_s: float = 0.0,
        max_staleness: int | None = None,
        task_id_prefix: str = "",
    ) -> GroupLeases:
        """Groups of a stage, oldest first, nothing below `min_groups`; waits up to `wait_s`.

        Scored groups staler than `max_staleness` versions are dropped on the way. The prefix of
        task ids is for the evaluation stage.
        """
        request = pb.LeaseGroupsRequest(
            run=run,
            stage=int(stage),  # type: ignore[arg-type]
            worker=worker,
            max_groups=max_groups,
            min_groups=min_groups,
            lease_s=lease_s,
            wait_s=wait_s,
            max_staleness=max_staleness,
            task_id_prefix=task_id_prefix,
        )
        answer = await self._channel.call(LEASE_GROUPS, request, deadline_s=_waiting(wait_s))
        leases = (
            GroupLease(
                lease_id=lease.lease_id,
                group=group_from_proto(lease.group),
                num_deliveries=lease.num_deliveries,
                expires_in_s=lease.expires_in_s,
            )
            for lease in answer.leases
        )
        return GroupLeases(
            leases=tuple(leases),
            empty_reason=EmptyReason(answer.empty_reason),
            num_ready=answer.num_ready,
        )

    async def acknowledge(self, run: str, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """The groups are consumed; returns the leases that were lost to others meanwhile."""
        return await self._acknowledge(run, lease_ids, LeaseOutcome.CONSUMED, "")

    async def drop(self, run: str, lease_ids: Iterable[str], reason: str) -> tuple[str, ...]:
        """The groups are thrown away, as `uniform_reward`; returns the leases that were lost."""
        return await self._acknowledge(run, lease_ids, LeaseOutcome.DROPPED, reason)

    async def _acknowledge(
        self, run: str, lease_ids: Iterable[str], outcome: LeaseOutcome, reason: str
    ) -> tuple[str, ...]:
        items = [
            pb.AcknowledgeItem(lease_id=lease_id, outcome=int(outcome), reason=reason)  # type: ignore[arg-type]
            for lease_id in lease_ids
        ]
        answer = await self._channel.call(ACKNOWLEDGE, pb.AcknowledgeRequest(run=run, items=items))
        return tuple(o.lease_id for o in answer.outcomes if not o.acknowledged)

    async def give_back(
        self,
        run: str,
        leases: Iterable[ReturnItem | str],
        *,
        reason: str = "",
        failed: bool = False,
    ) -> Returned:
        """The work is not done: tasks are issued again and groups redelivered.

        A lease given by its id alone goes back for `reason`.
        """
        items = [
            ReturnItem(lease_id=lease, reason=reason, failed=failed)
            if isinstance(lease, str)
            else lease
            for lease in leases
        ]
        request = pb.ReturnRequest(
            run=run,
            items=[
                pb.ReturnItem(
                    lease_id=item.lease_id,
                    reason=item.reason,
                    num_trajectories=item.num_trajectories,
                    failed=item.failed,
                )
                for item in items
            ],
        )
        answer = await self._channel.call(RETURN, request)
        return Returned(num_returned=answer.num_returned, num_dropped=answer.num_dropped)

    async def extend(
        self, run: str, lease_ids: Iterable[str], *, lease_s: float
    ) -> tuple[str, ...]:
        """Move the deadlines to `lease_s` from now; returns the leases that are lost."""
        request = pb.ExtendRequest(run=run, lease_ids=lease_ids, lease_s=lease_s)
        return tuple((await self._channel.call(EXTEND, request)).lost_lease_ids)

    async def advance_policy(
        self,
        run: str,
        policy_version: PolicyVersion,
        *,
        max_outstanding_groups: int,
        trained_lease_ids: Iterable[str] = (),
    ) -> int:
        """Say which policy is live and which groups are in it; returns the credits."""
        request = pb.AdvancePolicyRequest(
            run=run,
            policy_version=policy_version_to_proto(policy_version),
            trained_lease_ids=trained_lease_ids,
            max_outstanding_groups=max_outstanding_groups,
        )
        return int((await self._channel.call(ADVANCE_POLICY, request)).credits)

    async def watch(self, run: str, *, interval_s: float = 1.0) -> AsyncIterator[ReplayStats]:
        """The ledger at once and after every change, at most every `interval_s`."""
        request = pb.WatchRequest(run=run, interval_s=interval_s)
        async for answer in self._channel.stream(WATCH, request):
            yield _stats_from_proto(answer.stats)

    async def get_stats(self, run: str) -> ReplayStats:
        """The ledger."""
        answer = await self._channel.call(GET_STATS, pb.GetStatsRequest(run=run))
        return _stats_from_proto(answer.stats)

    async def peek(self, run: str, stage: Stage, *, max_groups: int = 10) -> tuple[Group, ...]:
        """The groups that would be leased next, without leasing them."""
        request = pb.PeekRequest(run=run, stage=int(stage), max_groups=max_groups)  # type: ignore[arg-type]
        answer = await self._channel.call(PEEK, request)
        return tuple(group_from_proto(group) for group in answer.groups)

    async def list_dead_letters(self, run: str, *, max_groups: int = 100) -> tuple[DeadLetter, ...]:
        """Groups that were delivered too often, oldest first."""
        request = pb.ListDeadLettersRequest(run=run, max_groups=max_groups)
        answer = await self._channel.call(LIST_DEAD_LETTERS, request)
        return tuple(
            DeadLetter(
                group_id=letter.group_id,
                stage=Stage(letter.stage),
                reason=letter.reason,
                num_deliveries=letter.num_deliveries,
                group=group_from_proto(letter.group),
            )
            for letter in answer.dead_letters
        )

    async def requeue(self, run: str, group_ids: Iterable[str]) -> int:
        """Put dead letters back as if never delivered; returns how many."""
        request = pb.RequeueRequest(run=run, group_ids=group_ids)
        return int((await self._channel.call(REQUEUE, request)).num_requeued)

    async def purge(self, run: str, *, confirm: str) -> None:
        """Delete a run; `confirm` must repeat its name."""
        await self._channel.call(PURGE, pb.PurgeRequest(run=run, confirm=confirm))


def _waiting(wait_s: float) -> float:
    """A deadline that leaves the server time to wait."""
    return wait_s + 60.0


def _stats_from_proto(proto: pb.ReplayStats) -> ReplayStats:
    version = proto.policy_version if proto.HasField("policy_version") else None
    return ReplayStats(
        training=_counts_from_proto(proto.training),
        evaluation=_counts_from_proto(proto.evaluation),
        policy_version=None if version is None else policy_version_from_proto(version),
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
        num_groups_dropped=dict(proto.num_groups_dropped),
        num_trajectories_generated=proto.num_trajectories_generated,
        num_trajectories_consumed=proto.num_trajectories_consumed,
        num_trajectories_dropped=dict(proto.num_trajectories_dropped),
        num_trajectories_live=proto.num_trajectories_live,
    )
