"""ReplayClient: the task ledger, groups, leases and credits of a run, in domain types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Rpc
from dialoop.clients.ledger import (
    Appended,
    AppendItem,
    DeadLetter,
    EmptyReason,
    GroupLease,
    LeasedGroups,
    LeasedTasks,
    LedgerCounts,
    Offered,
    ReopenedLeases,
    ReplayStats,
    Returned,
    ReturnItem,
    TaskLease,
    stats_from_proto,
)
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.wire import (
    group_from_proto,
    group_to_proto,
    policy_version_to_proto,
    task_from_proto,
    task_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from dialoop.clients.channel import Channel
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Group, Task


__all__ = [
    "AppendItem",
    "Appended",
    "DeadLetter",
    "EmptyReason",
    "GroupLease",
    "LeasedGroups",
    "LeasedTasks",
    "LedgerCounts",
    "Offered",
    "ReopenedLeases",
    "ReplayClient",
    "ReplayStats",
    "ReturnItem",
    "Returned",
    "TaskLease",
]


def _rpc(name: str, *, is_retried: bool = True, deadline_s: float = 60.0) -> Rpc[Any, Any]:
    request, answer = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
    path = f"/dialoop.v1.ReplayService/{name}"
    return Rpc(path, request, answer, is_retried=is_retried, deadline_s=deadline_s)


# A repeated lease whose first answer was lost leaves leases that run out and come back.
OFFER_TASKS = _rpc("OfferTasks", is_retried=False)
LEASE_TASKS = _rpc("LeaseTasks")
APPEND_GROUPS = _rpc("AppendGroups")
LEASE_GROUPS = _rpc("LeaseGroups")
ACKNOWLEDGE = _rpc("Acknowledge")
RETURN = _rpc("Return")
EXTEND = _rpc("Extend")
LIST_LEASES = _rpc("ListLeases")
REOPEN_LEASES = _rpc("ReopenLeases")
ADVANCE_POLICY = _rpc("AdvancePolicy")
WATCH = _rpc("Watch", is_retried=False)
GET_STATS = _rpc("GetStats")
PEEK = _rpc("Peek")
LIST_DEAD_LETTERS = _rpc("ListDeadLetters")
REQUEUE = _rpc("Requeue")
PURGE = _rpc("Purge")

_ANSWER_S = 30.0


class ReplayClient:
    """Asks one replay service; `run` scopes everything."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def offer_tasks(
        self,
        run: str,
        tasks: Sequence[Task],
        *,
        expected_cursor: str = "",
        next_cursor: str = "",
    ) -> Offered:
        """Put tasks on offer, once each; raises Busy (CURSOR_MOVED) when another was first."""
        request = pb.OfferTasksRequest(
            run=run,
            tasks=[task_to_proto(task) for task in tasks],
            expected_cursor=expected_cursor,
            next_cursor=next_cursor,
        )
        answer = await self._channel.call(OFFER_TASKS, request)
        return Offered(num_new=answer.num_new, num_known=answer.num_known, cursor=answer.cursor)

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float = 60.0, wait_s: float = 0.0
    ) -> LeasedTasks:
        """Take up to `max_tasks` tasks to play; waits up to `wait_s` for a first one."""
        request = pb.LeaseTasksRequest(
            run=run, worker=worker, max_tasks=max_tasks, lease_s=lease_s, wait_s=wait_s
        )
        answer = await self._channel.call(LEASE_TASKS, request, deadline_s=wait_s + _ANSWER_S)
        leases = tuple(
            TaskLease(
                lease_id=lease.lease_id,
                task=task_from_proto(lease.task),
                attempt=lease.attempt,
                expires_in_s=lease.expires_in_s,
            )
            for lease in answer.leases
        )
        return LeasedTasks(
            leases=leases,
            empty_reason=EmptyReason(answer.empty_reason),
            credits=answer.credits,
            cursor=answer.cursor,
        )

    async def append_groups(
        self, run: str, stage: Stage, items: Sequence[AppendItem]
    ) -> tuple[Appended, ...]:
        """Hand groups on, each with its own outcome; repeating it does no harm."""
        request = pb.AppendGroupsRequest(
            run=run,
            stage=trajectory_pb2.Stage.Name(int(stage)),
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
            Appended(
                is_duplicate=outcome.status == pb.APPEND_STATUS_DUPLICATE,
                is_rejected=outcome.status == pb.APPEND_STATUS_REJECTED,
                reason=outcome.reason,
                message=outcome.message,
            )
            for outcome in answer.outcomes
        )

    async def append_group(
        self, run: str, stage: Stage, group: Group, *, lease_id: str
    ) -> Appended:
        """Hand one group on."""
        items = [AppendItem(group=group, lease_id=lease_id)]
        (outcome,) = await self.append_groups(run, stage, items)
        return outcome

    async def lease_groups(  # noqa: PLR0913 - the request has as many fields
        self,
        run: str,
        stage: Stage,
        *,
        worker: str,
        max_groups: int,
        min_groups: int = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        max_staleness: int | None = None,
        task_id_prefix: str = "",
    ) -> LeasedGroups:
        """Take groups, `min_groups` at least or none; waits up to `wait_s` for them."""
        request = pb.LeaseGroupsRequest(
            run=run,
            stage=trajectory_pb2.Stage.Name(int(stage)),
            worker=worker,
            max_groups=max_groups,
            min_groups=min_groups,
            lease_s=lease_s,
            wait_s=wait_s,
            max_staleness=max_staleness,
            task_id_prefix=task_id_prefix,
        )
        answer = await self._channel.call(LEASE_GROUPS, request, deadline_s=wait_s + _ANSWER_S)
        return LeasedGroups(
            leases=_group_leases(answer.leases),
            empty_reason=EmptyReason(answer.empty_reason),
            num_ready=answer.num_ready,
        )

    async def acknowledge(self, run: str, lease_ids: Sequence[str]) -> tuple[str, ...]:
        """Say that the groups are consumed for good; returns the leases that were lost."""
        return await self._acknowledge(run, lease_ids, pb.OUTCOME_CONSUMED, "")

    async def drop(self, run: str, lease_ids: Sequence[str], reason: str) -> tuple[str, ...]:
        """Give groups up under a snake_case reason; returns the leases that were lost."""
        return await self._acknowledge(run, lease_ids, pb.OUTCOME_DROPPED, reason)

    async def _acknowledge(
        self, run: str, lease_ids: Sequence[str], outcome: Any, reason: str
    ) -> tuple[str, ...]:
        if not lease_ids:
            return ()
        items = [
            pb.AcknowledgeItem(lease_id=lease_id, outcome=outcome, reason=reason)
            for lease_id in lease_ids
        ]
        request = pb.AcknowledgeRequest(run=run, items=items)
        answer = await self._channel.call(ACKNOWLEDGE, request)
        return tuple(found.lease_id for found in answer.outcomes if not found.acknowledged)

    async def give_back(self, run: str, items: Sequence[ReturnItem]) -> Returned:
        """Return leases: tasks are re-issued, groups delivered again or set aside."""
        request = pb.ReturnRequest(
            run=run,
            items=[
                pb.ReturnItem(
                    lease_id=item.lease_id,
                    reason=item.reason,
                    num_trajectories=item.num_trajectories,
                    failed=item.failed,
                    set_aside=item.set_aside,
                )
                for item in items
            ],
        )
        answer = await self._channel.call(RETURN, request)
        return Returned(num_returned=answer.num_returned, num_dropped=answer.num_dropped)

    async def extend(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float
    ) -> tuple[str, ...]:
        """Keep leases for `lease_s` more from now; returns those that were lost."""
        request = pb.ExtendRequest(run=run, lease_ids=lease_ids, lease_s=lease_s)
        return tuple((await self._channel.call(EXTEND, request)).lost_lease_ids)

    async def list_leases(self, run: str, stage: Stage, *, worker: str) -> tuple[str, ...]:
        """The leases of groups that a worker holds, oldest group first."""
        request = pb.ListLeasesRequest(
            run=run, stage=trajectory_pb2.Stage.Name(int(stage)), worker=worker
        )
        return tuple((await self._channel.call(LIST_LEASES, request)).lease_ids)

    async def reopen_leases(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float
    ) -> ReopenedLeases:
        """The groups of leases that an earlier process took, under the same leases; all or none."""
        request = pb.ReopenLeasesRequest(run=run, lease_ids=lease_ids, lease_s=lease_s)
        answer = await self._channel.call(REOPEN_LEASES, request)
        return ReopenedLeases(
            leases=_group_leases(answer.leases), lost=tuple(answer.lost_lease_ids)
        )

    async def advance_policy(
        self,
        run: str,
        policy_version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str] = (),
        max_outstanding_groups: int,
    ) -> int:
        """Say which policy is live and what it was trained on; returns the credits left."""
        request = pb.AdvancePolicyRequest(
            run=run,
            policy_version=policy_version_to_proto(policy_version),
            trained_lease_ids=trained_lease_ids,
            max_outstanding_groups=max_outstanding_groups,
        )
        return int((await self._channel.call(ADVANCE_POLICY, request)).credits)

    async def watch(self, run: str, *, interval_s: float = 1.0) -> AsyncIterator[ReplayStats]:
        """The stats at once and after changes, at most every `interval_s`."""
        request = pb.WatchRequest(run=run, interval_s=interval_s)
        async for answer in self._channel.stream(WATCH, request):
            yield stats_from_proto(answer.stats)

    async def get_stats(self, run: str) -> ReplayStats:
        """The ledger's counts."""
        answer = await self._channel.call(GET_STATS, pb.GetStatsRequest(run=run))
        return stats_from_proto(answer.stats)

    async def peek(self, run: str, stage: Stage, *, max_groups: int = 1) -> tuple[Group, ...]:
        """Look at waiting groups without leasing them."""
        request = pb.PeekRequest(
            run=run, stage=trajectory_pb2.Stage.Name(int(stage)), max_groups=max_groups
        )
        answer = await self._channel.call(PEEK, request)
        return tuple(group_from_proto(group) for group in answer.groups)

    async def list_dead_letters(self, run: str, *, max_groups: int = 100) -> tuple[DeadLetter, ...]:
        """Groups that were given up after too many deliveries."""
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

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """Put dead letters back; returns how many."""
        request = pb.RequeueRequest(run=run, group_ids=group_ids)
        return int((await self._channel.call(REQUEUE, request)).num_requeued)

    async def purge(self, run: str) -> None:
        """Delete everything of the run."""
        await self._channel.call(PURGE, pb.PurgeRequest(run=run, confirm=run))


def _group_leases(leases: Iterable[pb.GroupLease]) -> tuple[GroupLease, ...]:
    return tuple(
        GroupLease(
            lease_id=lease.lease_id,
            group=group_from_proto(lease.group),
            num_deliveries=lease.num_deliveries,
            expires_in_s=lease.expires_in_s,
        )
        for lease in leases
    )
