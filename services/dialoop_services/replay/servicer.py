"""ReplayService: validate a request, let the store apply it, and wake the calls that wait for it.

A waiting call tries again after each change in this process (`_Changes`). It also tries again every
`poll_s`, because other processes make changes and leases expire.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    MutableSequence,
    Sequence,
)
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import replay_service_pb2_grpc as rpc
from dialoop.v1 import trajectory_pb2

from dialoop_services.replay.refusals import APPEND_MESSAGES
from dialoop_services.replay.store import Answer, Kind, QueueStore, parse_lease
from dialoop_services.replay.validation import check_group, check_trajectory
from dialoop_services.runtime.access.principals import require_run
from dialoop_services.runtime.calls import off_loop, too_many_items

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_TASK_ID = 512
_MAX_SECONDS = 30 * 24 * 3600.0
LEAST_INTERVAL_S = 0.05
"""Seconds between two looks of one who watches, however few it asks for."""
# Lua's JSON would round larger numbers.
_MAX_VERSION = 10**12
_DEFAULT_PAGE = 20

# Of the outcomes of a group's members, the one that is told of the group.
_FIRST_TOLD = (pb.APPEND_STATUS_REJECTED, pb.APPEND_STATUS_APPENDED, pb.APPEND_STATUS_DUPLICATE)
_STAGES = frozenset(map(int, Stage))
_SELECTIONS = frozenset(pb.Selection.values())

_Context = grpc.aio.ServicerContext[Any, Any]
_Leases = TypeVar("_Leases", pb.LeaseTasksResponse, pb.LeaseGroupsResponse)
_Item = TypeVar("_Item")
_MAX_MEMBERS = 4096
"""Trajectories of one request: the ledger works on each, and on nothing else meanwhile."""


class ReplayServicer(rpc.ReplayServiceServicer):
    """The queue over the wire; `vocab_size` returns 0 while the vocabulary is unknown."""

    def __init__(
        self,
        store: QueueStore,
        *,
        vocab_size: Callable[[], int] = lambda: 0,
        poll_s: float = 0.25,
    ) -> None:
        self.store = store
        self._vocab_size = vocab_size
        self._poll_s = poll_s
        self._changes = _Changes()
        self._stop = asyncio.Event()
        self.num_overflowed: Counter[str] = Counter()
        """Groups that calls to this process dropped for want of room, by reason."""

    def stop_waiting(self) -> None:
        """Answer all waiting calls, so that the service can end without breaking them off."""
        self._stop.set()
        self._changes.signal_all()

    async def OfferTasks(
        self, request: pb.OfferTasksRequest, context: _Context
    ) -> pb.OfferTasksResponse:
        for task in request.tasks:
            _check_task(task)
        return await self._change(request, pb.OfferTasksResponse)

    async def LeaseTasks(
        self, request: pb.LeaseTasksRequest, context: _Context
    ) -> pb.LeaseTasksResponse:
        self._check_lease_s(request)
        _check_worker(request.worker)
        _check_count("max_tasks", request.max_tasks)
        return await self._lease(request, pb.LeaseTasksResponse)

    async def AppendMembers(
        self, request: pb.AppendMembersRequest, context: _Context
    ) -> pb.AppendMembersResponse:
        check_run(request.run)
        _require_few(
            len(request.items),
            *(item.lease_id for item in request.items),
            *(item.trajectory.trajectory_id for item in request.items),
        )
        for item in request.items:
            _check_count("num_discarded", item.num_discarded, least=0)
        vocab_size = self._vocab_size()

        def check(item: pb.MemberItem) -> pb.AppendOutcome | None:
            return check_trajectory(
                item.trajectory,
                group_id=_group_of(item),
                stage=Stage.UNSCORED,
                vocab_size=vocab_size,
            )

        rejections = await _checked(request, check)
        if any(rejections):  # else it is not copied
            valid = _valid(request.items, rejections)
            request = pb.AppendMembersRequest(run=request.run, items=valid)
        appended = await self._append_members(request)
        outcomes = await self._outcomes(request.run, rejections, appended.outcomes)
        return pb.AppendMembersResponse(outcomes=outcomes, num_overflowed=appended.num_overflowed)

    async def _append_members(self, request: pb.AppendMembersRequest) -> pb.AppendMembersResponse:
        appended = await self._change(request, pb.AppendMembersResponse)
        self.num_overflowed.update(appended.num_overflowed)
        return appended

    async def AppendTurns(
        self, request: pb.AppendTurnsRequest, context: _Context
    ) -> pb.AppendTurnsResponse:
        _require_few(len(request.items), *(item.lease_id for item in request.items))
        for item in request.items:
            _check_turn(item.turn)
        answer = await self._apply(request, pb.AppendTurnsResponse)
        return pb.AppendTurnsResponse(outcomes=map(_explained, answer.outcomes))

    async def GetTurns(self, request: pb.GetTurnsRequest, context: _Context) -> pb.GetTurnsResponse:
        return await self._apply(request, pb.GetTurnsResponse)

    async def AppendGroups(
        self, request: pb.AppendGroupsRequest, context: _Context
    ) -> pb.AppendGroupsResponse:
        check_run(request.run)
        stage = _stage_of(request.stage)
        played = [each for item in request.items for each in item.group.trajectories]
        _require_few(
            len(request.items) + len(played),
            *(item.lease_id for item in request.items),
            *(item.group.task.task_id for item in request.items),
            *(each.trajectory_id for each in played),
        )
        for item in request.items:
            _check_num_discarded(item, stage)
            _check_priority(item, stage)
        vocab_size = self._vocab_size()

        def check(item: pb.AppendItem) -> pb.AppendOutcome | None:
            return _check_played(item, stage) or check_group(
                item.group, stage=stage, vocab_size=vocab_size
            )

        rejections = await _checked(request, check)
        valid = _valid(request.items, rejections)
        if stage is Stage.SCORED:
            if any(rejections):
                run, kind = request.run, request.stage
                request = pb.AppendGroupsRequest(run=run, stage=kind, items=valid)
            appended = list((await self._change(request, pb.AppendGroupsResponse)).outcomes)
        else:
            of_each = partial(members_of_groups, request.run, valid)
            members = await self._append_members(await off_loop(request.ByteSize(), of_each))
            appended = list(outcomes_of_groups(valid, members.outcomes))
        outcomes = await self._outcomes(request.run, rejections, appended)
        return pb.AppendGroupsResponse(outcomes=outcomes)

    async def _outcomes(
        self,
        run: str,
        rejections: Sequence[pb.AppendOutcome | None],
        appended: Iterable[pb.AppendOutcome],
    ) -> list[pb.AppendOutcome]:
        """Return the outcomes of all items, given those of the items that were not rejected."""
        if num_rejected := len(rejections) - rejections.count(None):
            await self.store.count_rejected(run, num_rejected)
        rest = iter(appended)
        return [_explained(next(rest) if r is None else r) for r in rejections]

    async def LeaseGroups(
        self, request: pb.LeaseGroupsRequest, context: _Context
    ) -> pb.LeaseGroupsResponse:
        self._check_lease_s(request)
        _check_query(request)
        return await self._lease(request, pb.LeaseGroupsResponse)

    async def Acknowledge(
        self, request: pb.AcknowledgeRequest, context: _Context
    ) -> pb.AcknowledgeResponse:
        for item in request.items:
            if item.outcome not in (pb.OUTCOME_CONSUMED, pb.OUTCOME_DROPPED):
                raise InvalidInput(
                    "`outcome` is unspecified or unknown.",
                    remedy="Use OUTCOME_CONSUMED or OUTCOME_DROPPED.",
                )
            if item.outcome == pb.OUTCOME_DROPPED:
                _check_reason(item.reason)
        return await self._change(request, pb.AcknowledgeResponse)

    async def Return(self, request: pb.ReturnRequest, context: _Context) -> pb.ReturnResponse:
        for item in request.items:
            _check_return(item)
        return await self._change(request, pb.ReturnResponse)

    async def Extend(self, request: pb.ExtendRequest, context: _Context) -> pb.ExtendResponse:
        self._check_lease_s(request)
        _drop_repeats(request.lease_ids)
        return await self._apply(request, pb.ExtendResponse)

    async def ListLeases(
        self, request: pb.ListLeasesRequest, context: _Context
    ) -> pb.ListLeasesResponse:
        _stage_of(request.stage)
        _check_worker(request.worker)
        return await self._apply(request, pb.ListLeasesResponse)

    async def ReopenLeases(
        self, request: pb.ReopenLeasesRequest, context: _Context
    ) -> pb.ReopenLeasesResponse:
        self._check_lease_s(request)
        _drop_repeats(request.lease_ids)
        return await self._apply(request, pb.ReopenLeasesResponse)

    async def AdvancePolicy(
        self, request: pb.AdvancePolicyRequest, context: _Context
    ) -> pb.AdvancePolicyResponse:
        version = request.policy_version
        if not version.lineage or not 0 <= version.number <= _MAX_VERSION:
            raise InvalidInput(
                f"Policy version '{version.lineage}-{version.number}' is incomplete or out of "
                "range.",
                remedy="Give a lineage and a number from 0 on.",
            )
        _check_count("max_outstanding_groups", request.max_outstanding_groups, least=0)
        _drop_repeats(request.trained_lease_ids)
        return await self._change(request, pb.AdvancePolicyResponse)

    async def Watch(
        self, request: pb.WatchRequest, context: _Context
    ) -> AsyncIterator[pb.WatchResponse]:
        check_run(request.run)
        check_seconds("interval_s", request.interval_s)
        if not request.interval_s:
            raise InvalidInput("`interval_s` is 0.", remedy="Give seconds above 0.")
        last: pb.ReplayStats | None = None
        while not self._stop.is_set():
            change = self._changes.next_of(request.run)
            answer = await self._apply(pb.GetStatsRequest(run=request.run), pb.GetStatsResponse)
            if (counts := _without_ages(answer.stats)) != last:
                last = counts
                yield pb.WatchResponse(stats=answer.stats)
                await wait_for(self._stop, max(request.interval_s, LEAST_INTERVAL_S))
            else:
                await wait_for(change, max(request.interval_s, self._poll_s))

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        return await self._apply(request, pb.GetStatsResponse)

    async def Peek(self, request: pb.PeekRequest, context: _Context) -> pb.PeekResponse:
        _stage_of(request.stage)
        _check_page(request)
        return await self._apply(request, pb.PeekResponse)

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: _Context
    ) -> pb.ListDeadLettersResponse:
        _check_page(request)
        return await self._apply(request, pb.ListDeadLettersResponse)

    async def Requeue(self, request: pb.RequeueRequest, context: _Context) -> pb.RequeueResponse:
        _drop_repeats(request.group_ids)
        return await self._change(request, pb.RequeueResponse)

    async def Purge(self, request: pb.PurgeRequest, context: _Context) -> pb.PurgeResponse:
        check_run(request.run)
        if request.confirm != request.run:
            raise PreconditionFailed(
                f"Deleting run '{request.run}' needs a confirmation.",
                reason=Reason.CONFIRM_RUN,
                remedy="Repeat the run's name in `confirm`.",
            )
        return await self._change(request, pb.PurgeResponse)

    async def _apply(self, request: Any, answer: type[Answer]) -> Answer:
        check_run(request.run)
        return await self.store.apply(request, answer)

    async def _change(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a request, then wake the calls that wait for a change of the run."""
        response = await self._apply(request, answer)
        self._changes.signal(request.run)
        return response

    async def _lease(self, request: Any, answer: type[_Leases]) -> _Leases:
        """Lease as soon as there is enough, or return the reason why not after `wait_s`."""
        check_seconds("wait_s", request.wait_s)
        clock = asyncio.get_running_loop().time
        end = clock() + request.wait_s
        while True:
            change = self._changes.next_of(request.run)
            response = await self._apply(request, answer)
            remaining = end - clock()
            if response.empty_reason == pb.EMPTY_REASON_NOT_EMPTY:
                # A lease changes the stats that Watch calls wait for.
                self._changes.signal(request.run)
                return response
            if remaining <= 0 or self._stop.is_set():
                return response
            await wait_for(change, min(remaining, self._poll_s))

    def _check_lease_s(self, request: Any) -> None:
        """Raise InvalidInput for an impossible `lease_s`; replace 0 by the default."""
        check_seconds("lease_s", request.lease_s)
        request.lease_s = request.lease_s or self.store.limits.lease_s


async def _checked(
    request: pb.AppendMembersRequest | pb.AppendGroupsRequest,
    check: Callable[[Any], pb.AppendOutcome | None],
) -> list[pb.AppendOutcome | None]:
    """Return what rejects each item of a request."""
    return await off_loop(request.ByteSize(), lambda: [check(item) for item in request.items])


def _require_few(num_members: int, *names: str) -> None:
    """Raise InvalidInput for more members, or longer names, than the ledger takes at once."""
    if num_members > _MAX_MEMBERS:
        raise too_many_items(_MAX_MEMBERS)
    if (longest := max(map(len, names), default=0)) > 2 * _MAX_TASK_ID:
        raise InvalidInput(
            f"An id has {longest} characters.",
            remedy=f"Use at most {_MAX_TASK_ID} characters for an id.",
        )


def _without_ages(stats: pb.ReplayStats) -> pb.ReplayStats:
    """Return the stats without what every moment changes."""
    counts = pb.ReplayStats()
    counts.CopyFrom(stats)
    counts.training.ClearField("oldest_s")
    counts.evaluation.ClearField("oldest_s")
    return counts


class _Changes:
    """Wakes the calls that wait for a change of a run in this process.

    change = changes.next_of("my-run")  # before looking, so that no change is missed
    ...look...
    await change.wait()
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def next_of(self, run: str) -> asyncio.Event:
        """Return the event of the run's next change."""
        return self._events.setdefault(run, asyncio.Event())

    def signal(self, run: str) -> None:
        """Wake all who wait for the run, because it changed."""
        event = self._events.pop(run, None)
        if event is not None:
            event.set()

    def signal_all(self) -> None:
        """Wake all who wait for any run."""
        for run in tuple(self._events):
            self.signal(run)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, but not longer than `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def members_of_groups(run: str, items: Iterable[pb.AppendItem]) -> pb.AppendMembersRequest:
    """Return the request that appends each member of played groups."""
    request = pb.AppendMembersRequest(run=run)
    for item in items:
        for member, trajectory in enumerate(item.group.trajectories):
            request.items.add(
                lease_id=item.lease_id,
                member=member,
                trajectory=trajectory,
                num_discarded=0 if member else item.num_discarded,
            )
    return request


def outcomes_of_groups(
    items: Iterable[pb.AppendItem], outcomes: Iterable[pb.AppendOutcome]
) -> Iterator[pb.AppendOutcome]:
    """Yield each group's outcome: the rejection of a member if there is one; else what is new."""
    rest = iter(outcomes)
    for item in items:
        own = list(itertools.islice(rest, len(item.group.trajectories)))
        own.sort(key=lambda outcome: _FIRST_TOLD.index(outcome.status))
        yield own[0] if own else _rejection(Reason.WRONG_SIZE)


def _valid(items: Iterable[_Item], rejections: Iterable[pb.AppendOutcome | None]) -> list[_Item]:
    pairs = zip(items, rejections, strict=True)
    return [item for item, rejection in pairs if rejection is None]


def _group_of(item: pb.MemberItem) -> str:
    """Return the group of a member, which the store refuses under another lease than a task's."""
    lease = parse_lease(item.lease_id)
    return item.trajectory.group_id if lease is None else lease.task_id


def _check_played(item: pb.AppendItem, stage: Stage) -> pb.AppendOutcome | None:
    """Reject a played group of which the store would take some members only, or as another's."""
    if stage is Stage.SCORED:
        return None
    group, lease = item.group, parse_lease(item.lease_id)
    purpose = Purpose.EVALUATION if stage is Stage.EVALUATION else Purpose.TRAINING
    if int(group.task.purpose) != purpose:
        reason = Reason.UNKNOWN_TASK
    elif lease is None or lease.task_id != group.task.task_id:
        reason = Reason.LEASE_LOST
    elif len(group.trajectories) != group.task.num_trajectories:
        reason = Reason.WRONG_SIZE
    else:
        return None
    return _rejection(reason)


def _explained(outcome: pb.AppendOutcome) -> pb.AppendOutcome:
    """Give an outcome with a reason its message, unless it has one."""
    if outcome.reason and not outcome.message:
        outcome.message = APPEND_MESSAGES[Reason(outcome.reason)]
    return outcome


def _check_turn(turn: pb.RecordedTurn) -> None:
    _check_count("turn", turn.turn, least=0)
    if not 0 < len(turn.trajectory_id) <= _MAX_TASK_ID or len(turn.sampled.samples) != 1:
        raise InvalidInput(
            f"Turn {turn.turn} has {len(turn.sampled.samples)} samples, and a trajectory_id of "
            f"{len(turn.trajectory_id)} characters.",
            remedy=f"Give one sample, and an id of 1 to {_MAX_TASK_ID} characters.",
        )


def _rejection(reason: Reason) -> pb.AppendOutcome:
    return pb.AppendOutcome(status=pb.APPEND_STATUS_REJECTED, reason=reason)


def check_run(run: str) -> None:
    """Raise InvalidInput (BAD_RUN) for a name that cannot be part of a key.

    Raise PermissionDenied (TICKET_OF_OTHER_RUN) where a member of another run asks.
    """
    require_run(run)
    if not _RUN.fullmatch(run):
        raise InvalidInput(
            f"'{run[:128]}' is not a valid name of a run.",
            reason=Reason.BAD_RUN,
            remedy="Use 1 to 128 letters, digits, '.', '_' and '-'; begin with a letter or digit.",
        )


def _check_task(task: trajectory_pb2.Task) -> None:
    if not 0 < len(task.task_id) <= _MAX_TASK_ID:
        raise InvalidInput(
            f"A task_id has {len(task.task_id)} characters.",
            remedy=f"Give each task an id of 1 to {_MAX_TASK_ID} characters.",
        )
    if int(task.purpose) not in set(Purpose):
        raise InvalidInput(f"Task {task.task_id} has no purpose.", remedy="Set purpose.")
    _check_count("num_trajectories", task.num_trajectories)
    if not 0 <= task.min_trajectories <= task.num_trajectories:
        raise InvalidInput(
            f"`min_trajectories` of task {task.task_id} is {task.min_trajectories}, of "
            f"{task.num_trajectories} trajectories.",
            remedy="Use 0 for whole groups only, or up to `num_trajectories`.",
        )


def _stage_of(stage: int) -> Stage:
    """Return the stage; raise InvalidInput where it is not set."""
    if stage not in _STAGES:
        raise InvalidInput("`stage` is unspecified or unknown.", remedy="Set `stage`.")
    return Stage(stage)


def _check_worker(worker: str) -> None:
    """Raise InvalidInput where no worker is named; people look for it when leases are pending."""
    if not worker:
        raise InvalidInput("`worker` is empty.", remedy="Name the worker that leases.")


def _check_count(name: str, value: int, *, least: int = 1) -> None:
    if value < least:
        raise InvalidInput(f"`{name}` is {value}.", remedy=f"Use {least} or more.")


def _check_page(request: pb.PeekRequest | pb.ListDeadLettersRequest) -> None:
    """Raise InvalidInput for a negative `max_groups`; replace 0 by 20."""
    _check_count("max_groups", request.max_groups, least=0)
    request.max_groups = request.max_groups or _DEFAULT_PAGE


def check_seconds(name: str, value: float) -> None:
    """Raise InvalidInput unless the value is between 0 and 30 days."""
    if not 0 <= value <= _MAX_SECONDS:
        raise InvalidInput(f"`{name}` is {value}.", remedy="Use 0 to 30 days, in seconds.")


def _check_query(request: pb.LeaseGroupsRequest) -> None:
    stage = _stage_of(request.stage)
    _check_worker(request.worker)
    _check_count("max_groups", request.max_groups)
    _check_count("min_groups", request.min_groups, least=0)
    if request.min_groups > request.max_groups:
        raise InvalidInput(
            f"`min_groups` is {request.min_groups} and `max_groups` only {request.max_groups}.",
            remedy="Lower `min_groups` or raise `max_groups`.",
        )
    if request.HasField("max_staleness") and stage is not Stage.SCORED:
        raise InvalidInput(
            "`max_staleness` works only with STAGE_SCORED.", remedy="Leave `max_staleness` out."
        )
    if request.selection not in _SELECTIONS:
        raise InvalidInput(
            f"`selection` is {int(request.selection)}, which is unknown.",
            remedy="Use SELECTION_FIFO, SELECTION_UNIFORM or SELECTION_PRIORITY.",
        )
    if request.task_id_prefix and stage is not Stage.EVALUATION:
        raise InvalidInput(
            "`task_id_prefix` works only with STAGE_EVALUATION.", remedy="Leave it out."
        )


def _check_num_discarded(item: pb.AppendItem, stage: Stage) -> None:
    _check_count("num_discarded", item.num_discarded, least=0)
    if item.num_discarded and stage is Stage.SCORED:
        raise InvalidInput(
            "`num_discarded` counts played trajectories, and none are played for STAGE_SCORED.",
            remedy="Leave `num_discarded` out.",
        )


def _check_priority(item: pb.AppendItem, stage: Stage) -> None:
    if not math.isfinite(item.priority) or (item.priority and stage is not Stage.SCORED):
        raise InvalidInput(
            f"`priority` is {item.priority}.",
            remedy="Use a finite number, with STAGE_SCORED only.",
        )


def _check_return(item: pb.ReturnItem) -> None:
    _check_count("num_trajectories", item.num_trajectories, least=0)
    _check_reason(item.reason)
    lease = parse_lease(item.lease_id)
    if lease is None:
        return
    if item.num_trajectories and lease.kind is not Kind.TASK:
        raise InvalidInput(
            "`num_trajectories` counts played trajectories, and under the lease of a group none "
            "are played.",
            remedy="Leave `num_trajectories` out.",
        )
    if item.failed_members and (lease.kind is not Kind.TASK or not item.failed):
        raise InvalidInput(
            "`failed_members` is for a task that is returned as failed.",
            remedy="Set `failed`, or leave `failed_members` out.",
        )
    if item.set_aside and lease.kind is Kind.TASK:
        raise InvalidInput(
            "`set_aside` is for groups, and this is the lease of a task.",
            remedy="Leave `set_aside` out.",
        )


def _check_reason(reason: str) -> None:
    if not _REASON.fullmatch(reason):
        raise InvalidInput(
            f"'{reason[:64]}' is not a valid reason.",
            remedy="Use snake_case of up to 64 characters.",
        )


def _drop_repeats(values: MutableSequence[str]) -> None:
    """Remove repeated values; keep the order."""
    values[:] = list(dict.fromkeys(values))
