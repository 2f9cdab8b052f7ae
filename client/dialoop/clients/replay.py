"""ReplayClient: the task ledger, groups, leases and credits of a run, in domain types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

from dialoop.clients.channel import Channel, rpc_of
from dialoop.clients.turns import TurnItem, turn_item_to_proto, turns_from_proto
from dialoop.episode import RecordedTurn
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Group, Stage, Task, Trajectory
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.wire.codec import Codec, enum, many, submessage
from dialoop.wire.records import GROUP, TASK, TRAJECTORY
from dialoop.wire.sequences import POLICY_VERSION


class EmptyReason(IntEnum):
    """Why a lease came back with nothing, or less than was asked for."""

    NOT_EMPTY = 1
    NO_TASKS = 2
    NO_CREDITS = 3
    NO_GROUPS = 4
    TOO_FEW = 5
    NO_POLICY = 6


class Selection(IntEnum):
    """Which of the ready groups are leased; none is drawn twice."""

    FIFO = 1
    UNIFORM = 2
    PRIORITY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What an offer changed; `cursor` is the data position now."""

    num_new: int
    num_known: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """A task to play: those of its `members` that are not in the queue yet, by index from 0.

    Of the `recorded_members` the queue keeps turns.
    """

    lease_id: str
    task: Task
    attempt: int
    expires_in_s: float
    members: tuple[int, ...]
    recorded_members: tuple[int, ...] = ()

    @property
    def group_id(self) -> str:
        """Return the name of its group, which is the task's."""
        return self.task.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTasks:
    """Leased tasks, or why there are none."""

    leases: tuple[TaskLease, ...]
    empty_reason: EmptyReason
    credits: int
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberItem:
    """A finished member of a leased task; `num_discarded` plays of it were thrown away before."""

    lease_id: str
    member: int
    trajectory: Trajectory
    num_discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    """A group and the lease it was made under; `num_discarded` members were played again.

    Of scored groups Selection.PRIORITY leases those of the highest `priority` first.
    """

    group: Group
    lease_id: str
    num_discarded: int = 0
    priority: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What became of an appended member or group; `reason` is empty unless it was rejected."""

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
    """A lease to give back; `num_trajectories` were played under it and are discarded.

    `failed` counts towards the limit of attempts, of a task for its `failed_members`, or for all
    that are not finished; `set_aside` makes a group a dead letter at once.
    """

    lease_id: str
    reason: str
    num_trajectories: int = 0
    failed: bool = False
    set_aside: bool = False
    failed_members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """How many leases went back, and how many tasks or groups were given up for good."""

    num_returned: int
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Counts of one purpose. Trajectories: generated = consumed + dropped + live.

    `num_trajectories_waiting` are the live ones of groups that are not closed yet. oldest_s: age in
    seconds of the oldest task or group that is "offered", "leased", "unscored" or "scored", for
    those states that have some; groups that a scorer or a trainer holds count in none.
    """

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
    num_trajectories_waiting: int
    num_groups_closed_short: int
    num_groups_dropped: dict[str, int] = field(default_factory=dict)
    num_trajectories_dropped: dict[str, int] = field(default_factory=dict)
    oldest_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Return the number of tasks and groups that are neither consumed nor dropped."""
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
    """The state of a run's ledger.

    `is_full`: the store's memory is nearly used up, and offers and appends are refused.
    `settled_cursor`: the position in the data before which every task was consumed or dropped once.
    A dead letter is dropped; one that is requeued later does not move it back.
    """

    training: LedgerCounts
    evaluation: LedgerCounts
    policy_version: PolicyVersion | None = None
    max_outstanding_groups: int
    credits: int
    num_redelivered: int
    num_dead_letters: int
    num_duplicate_appends: int
    num_rejected_appends: int
    cursor: str
    store: str
    is_full: bool
    settled_cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that was delivered too often without being acknowledged."""

    group_id: str
    stage: Stage
    reason: str
    num_deliveries: int
    group: Group


_OFFERED = Codec(Offered, pb.OfferTasksResponse)
_EMPTY_REASON = enum(EmptyReason)
_TASK_LEASE = Codec(TaskLease, pb.TaskLease, task=submessage(TASK))
_LEASED_TASKS = Codec(
    LeasedTasks, pb.LeaseTasksResponse, leases=many(_TASK_LEASE), empty_reason=_EMPTY_REASON
)
_MEMBER_ITEM = Codec(MemberItem, pb.MemberItem, trajectory=submessage(TRAJECTORY))
_APPEND_ITEM = Codec(AppendItem, pb.AppendItem, group=submessage(GROUP))
_GROUP_LEASE = Codec(GroupLease, pb.GroupLease, group=submessage(GROUP))
_RETURN_ITEM = Codec(ReturnItem, pb.ReturnItem)
_RETURNED = Codec(Returned, pb.ReturnResponse)
_COUNTS = Codec(LedgerCounts, pb.LedgerCounts)
_STATS = Codec(
    ReplayStats,
    pb.ReplayStats,
    training=submessage(_COUNTS),
    evaluation=submessage(_COUNTS),
    policy_version=submessage(POLICY_VERSION),
)
_DEAD_LETTER = Codec(DeadLetter, pb.DeadLetter, stage=enum(Stage), group=submessage(GROUP))

_rpc = partial(rpc_of, pb, "ReplayService", is_retried=True)
# A repeated lease whose first answer was lost leaves leases that run out and come back.
OFFER_TASKS = _rpc("OfferTasks", is_retried=False)
LEASE_TASKS = _rpc("LeaseTasks", is_poll=True)
APPEND_MEMBERS = _rpc("AppendMembers")
APPEND_TURNS = _rpc("AppendTurns")
GET_TURNS = _rpc("GetTurns")
APPEND_GROUPS = _rpc("AppendGroups")
LEASE_GROUPS = _rpc("LeaseGroups", is_poll=True)
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
        """Offer tasks, once each; raise Busy (CURSOR_MOVED) where another collector was first."""
        request = pb.OfferTasksRequest(
            run=run,
            tasks=[TASK.to_proto(task) for task in tasks],
            expected_cursor=expected_cursor,
            next_cursor=next_cursor,
        )
        answer = await self._channel.call(OFFER_TASKS, request)
        return _OFFERED.from_proto(answer)

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float = 60.0, wait_s: float = 0.0
    ) -> LeasedTasks:
        """Lease up to `max_tasks` tasks to play; wait up to `wait_s` for a first one."""
        request = pb.LeaseTasksRequest(
            run=run, worker=worker, max_tasks=max_tasks, lease_s=lease_s, wait_s=wait_s
        )
        answer = await self._channel.call(LEASE_TASKS, request, deadline_s=wait_s + _ANSWER_S)
        return _LEASED_TASKS.from_proto(answer)

    async def append_members(self, run: str, items: Sequence[MemberItem]) -> tuple[Appended, ...]:
        """Keep finished members, each with its own outcome; repeating it does no harm."""
        request = pb.AppendMembersRequest(run=run, items=map(_MEMBER_ITEM.to_proto, items))
        return _append_outcomes((await self._channel.call(APPEND_MEMBERS, request)).outcomes)

    async def append_turns(self, run: str, items: Sequence[TurnItem]) -> tuple[Appended, ...]:
        """Keep turns of episodes in play, each with its own outcome; repeating it does no harm."""
        request = pb.AppendTurnsRequest(run=run, items=map(turn_item_to_proto, items))
        return _append_outcomes((await self._channel.call(APPEND_TURNS, request)).outcomes)

    async def get_turns(self, run: str, lease_id: str, *, member: int) -> tuple[RecordedTurn, ...]:
        """Return the turns that are kept of a leased task's member, the first one first."""
        request = pb.GetTurnsRequest(run=run, lease_id=lease_id, member=member)
        answer = await self._channel.call(GET_TURNS, request)
        return turns_from_proto(answer.turns, answer.snapshot)

    async def append_groups(
        self, run: str, stage: Stage, items: Sequence[AppendItem]
    ) -> tuple[Appended, ...]:
        """Append groups to the queue, each with its own outcome; repeating it does no harm."""
        request = pb.AppendGroupsRequest(
            run=run,
            stage=trajectory_pb2.Stage.Name(int(stage)),
            items=map(_APPEND_ITEM.to_proto, items),
        )
        return _append_outcomes((await self._channel.call(APPEND_GROUPS, request)).outcomes)

    async def append_group(
        self, run: str, stage: Stage, group: Group, *, lease_id: str, priority: float = 0.0
    ) -> Appended:
        """Append one group to the queue."""
        items = [AppendItem(group=group, lease_id=lease_id, priority=priority)]
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
        selection: Selection | None = None,
    ) -> LeasedGroups:
        """Lease groups once `min_groups` are ready; wait up to `wait_s` for them.

        Groups that do not fit one message are leased with further calls.
        """
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
            selection=pb.Selection.Name(selection or Selection.FIFO),
        )
        answer = await self._channel.call(LEASE_GROUPS, request, deadline_s=wait_s + _ANSWER_S)
        leases = tuple(map(_GROUP_LEASE.from_proto, answer.leases))
        request.min_groups = request.wait_s = 0
        while answer.is_cut:
            request.max_groups = max_groups - len(leases)
            answer = await self._channel.call(LEASE_GROUPS, request)
            leases += tuple(map(_GROUP_LEASE.from_proto, answer.leases))
        return LeasedGroups(
            leases=leases,
            empty_reason=EmptyReason.NOT_EMPTY
            if leases
            else _EMPTY_REASON.decode(answer.empty_reason),
            num_ready=answer.num_ready,
        )

    async def acknowledge(self, run: str, lease_ids: Sequence[str]) -> tuple[str, ...]:
        """Mark groups as consumed for good; return the leases that were lost."""
        return await self._acknowledge(run, lease_ids, pb.OUTCOME_CONSUMED, "")

    async def drop(self, run: str, lease_ids: Sequence[str], reason: str) -> tuple[str, ...]:
        """Drop groups under a snake_case reason; return the leases that were lost."""
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
        return tuple(outcome.lease_id for outcome in answer.outcomes if not outcome.acknowledged)

    async def give_back(self, run: str, items: Sequence[ReturnItem]) -> Returned:
        """Give leases back: tasks are issued again, groups delivered again or set aside."""
        request = pb.ReturnRequest(run=run, items=map(_RETURN_ITEM.to_proto, items))
        return _RETURNED.from_proto(await self._channel.call(RETURN, request))

    async def extend(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float
    ) -> tuple[str, ...]:
        """Extend leases to `lease_s` from now; return those that were lost."""
        request = pb.ExtendRequest(run=run, lease_ids=lease_ids, lease_s=lease_s)
        return tuple((await self._channel.call(EXTEND, request)).lost_lease_ids)

    async def list_leases(self, run: str, stage: Stage, *, worker: str) -> tuple[str, ...]:
        """Return the leases of groups that a worker holds, oldest group first."""
        request = pb.ListLeasesRequest(
            run=run, stage=trajectory_pb2.Stage.Name(int(stage)), worker=worker
        )
        return tuple((await self._channel.call(LIST_LEASES, request)).lease_ids)

    async def reopen_leases(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float
    ) -> ReopenedLeases:
        """Take over leases of an earlier process, all or none, and return their groups."""
        leases: tuple[GroupLease, ...] = ()
        while True:
            rest = lease_ids[len(leases) :]
            request = pb.ReopenLeasesRequest(run=run, lease_ids=rest, lease_s=lease_s)
            answer = await self._channel.call(REOPEN_LEASES, request)
            if answer.lost_lease_ids:
                return ReopenedLeases(leases=(), lost=tuple(answer.lost_lease_ids))
            leases += tuple(map(_GROUP_LEASE.from_proto, answer.leases))
            if not answer.is_cut:
                return ReopenedLeases(leases=leases, lost=())

    async def advance_policy(
        self,
        run: str,
        policy_version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str] = (),
        max_outstanding_groups: int,
    ) -> int:
        """Announce the live policy and what it was trained on; return the credits left."""
        request = pb.AdvancePolicyRequest(
            run=run,
            policy_version=POLICY_VERSION.to_proto(policy_version),
            trained_lease_ids=trained_lease_ids,
            max_outstanding_groups=max_outstanding_groups,
        )
        return int((await self._channel.call(ADVANCE_POLICY, request)).credits)

    async def watch(self, run: str, *, interval_s: float = 1.0) -> AsyncIterator[ReplayStats]:
        """Yield the stats at once and after changes, at most every `interval_s`."""
        request = pb.WatchRequest(run=run, interval_s=interval_s)
        async for answer in self._channel.stream(WATCH, request):
            yield _STATS.from_proto(answer.stats)

    async def get_stats(self, run: str) -> ReplayStats:
        """Return the ledger's counts."""
        answer = await self._channel.call(GET_STATS, pb.GetStatsRequest(run=run))
        return _STATS.from_proto(answer.stats)

    async def peek(self, run: str, stage: Stage, *, max_groups: int = 1) -> tuple[Group, ...]:
        """Look at waiting groups without leasing them."""
        request = pb.PeekRequest(
            run=run, stage=trajectory_pb2.Stage.Name(int(stage)), max_groups=max_groups
        )
        answer = await self._channel.call(PEEK, request)
        return tuple(GROUP.from_proto(group) for group in answer.groups)

    async def list_dead_letters(self, run: str, *, max_groups: int = 100) -> tuple[DeadLetter, ...]:
        """Return groups that were given up after too many deliveries."""
        request = pb.ListDeadLettersRequest(run=run, max_groups=max_groups)
        answer = await self._channel.call(LIST_DEAD_LETTERS, request)
        return tuple(map(_DEAD_LETTER.from_proto, answer.dead_letters))

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """Put dead letters back into the queue; return how many."""
        request = pb.RequeueRequest(run=run, group_ids=group_ids)
        return int((await self._channel.call(REQUEUE, request)).num_requeued)

    async def purge(self, run: str) -> None:
        """Delete everything of the run."""
        await self._channel.call(PURGE, pb.PurgeRequest(run=run, confirm=run))


def _append_outcomes(outcomes: Iterable[pb.AppendOutcome]) -> tuple[Appended, ...]:
    return tuple(
        Appended(
            is_duplicate=outcome.status == pb.APPEND_STATUS_DUPLICATE,
            is_rejected=outcome.status == pb.APPEND_STATUS_REJECTED,
            reason=outcome.reason,
            message=outcome.message,
        )
        for outcome in outcomes
    )
