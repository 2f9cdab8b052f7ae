"""The queue as a readable model in memory, which the store in Redis is tested against.

Each request has one function here, and one script in `redis_store`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import registry_service_pb2 as registry_pb
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.wire.sequences import POLICY_VERSION
from dialoop_services.replay.refusals import refusal
from dialoop_services.replay.store import (
    Answer,
    Kind,
    QueueLimits,
    group_head,
    pack_group,
    pack_member,
    parse_lease,
)
from google.protobuf.message import Message

from tests.support.queue_model.assembly import Assembly
from tests.support.queue_model.ledger import (
    KIND_OF_STAGE,
    GroupState,
    Ledger,
    Record,
    StagedGroup,
)


class ModelStore:
    """A QueueStore in plain dicts. No method awaits, so each is atomic on one event loop."""

    def __init__(self, limits: QueueLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._ledgers: dict[str, Ledger] = {}

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a request, as `QueueStore.apply` says."""
        if isinstance(request, pb.PurgeRequest):
            self._ledgers.pop(request.run, None)
            return answer()
        response = _TRANSITIONS[type(request)](self._ledger(request.run), request)
        assert isinstance(response, answer)
        return response

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that the servicer rejected."""
        self._ledger(run).num_rejected += num_groups

    async def check(self) -> None:
        """Do nothing: memory is always reachable."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def _ledger(self, run: str) -> Ledger:
        now = self._clock()
        if run not in self._ledgers:
            # Tokens start at the clock, so that leases of a purged run are never used again.
            self._ledgers[run] = Ledger(limits=self.limits, token=int(now * 1_000_000))
        ledger = self._ledgers[run]
        ledger.num_overflowed.clear()  # what runs out now, and finds no room, is of this call
        ledger.reap(now)
        return ledger


def _offer_tasks(ledger: Ledger, request: pb.OfferTasksRequest) -> pb.OfferTasksResponse:
    if request.expected_cursor or request.next_cursor:
        if request.expected_cursor != ledger.cursor:
            raise refusal(Reason.CURSOR_MOVED, ledger.cursor)
        ledger.cursor = request.next_cursor
    num_new, page = 0, None
    for task in request.tasks:
        if task.task_id in ledger.records:
            continue
        if page is None and request.expected_cursor != request.next_cursor:
            page = ledger.next_order()
        record = Record(
            page=page,
            task_id=task.task_id,
            purpose=Purpose(task.purpose),
            assembly=Assembly(
                task.num_trajectories, task.min_trajectories, ledger.limits.max_attempts
            ),
            payload=group_head(task),
            order=ledger.next_order(),
            offered_ms=ledger.now_ms,
        )
        ledger.records[task.task_id] = record
        ledger.count(record, GroupState.OFFERED, 1)
        ledger.push_task(record)
        num_new += 1
    if page is not None:
        ledger.pages[page] = (request.expected_cursor, num_new)
    return pb.OfferTasksResponse(
        num_new=num_new, num_known=len(request.tasks) - num_new, cursor=ledger.cursor
    )


def _lease_tasks(ledger: Ledger, request: pb.LeaseTasksRequest) -> pb.LeaseTasksResponse:
    answer = pb.LeaseTasksResponse(empty_reason=pb.EMPTY_REASON_NOT_EMPTY, cursor=ledger.cursor)
    budget = {Purpose.EVALUATION: request.max_tasks, Purpose.TRAINING: ledger.credits}
    for purpose, allowed in budget.items():
        waiting = ledger.offered[purpose]
        for _ in range(min(allowed, request.max_tasks - len(answer.leases), len(waiting))):
            record = ledger.records[heapq.heappop(waiting)[1]]
            ledger.move(record, GroupState.LEASED)
            record.lease_id = ledger.new_lease(Kind.TASK, record.task_id, request.lease_s)
            record.has_progress = False
            record.expired_members = []
            answer.leases.add(
                lease_id=record.lease_id,
                task=trajectory_pb2.Group.FromString(record.payload).task,
                attempt=record.attempt,
                expires_in_s=request.lease_s,
                members=record.assembly.open_members,
                recorded_members=[
                    member
                    for member in record.assembly.open_members
                    if record.assembly.members[member].turns
                ],
            )
    if not answer.leases:
        if not ledger.offered[Purpose.TRAINING]:
            answer.empty_reason = pb.EMPTY_REASON_NO_TASKS
        elif ledger.policy is None:
            answer.empty_reason = pb.EMPTY_REASON_NO_POLICY
        else:
            answer.empty_reason = pb.EMPTY_REASON_NO_CREDITS
    answer.credits = ledger.credits
    return answer


def _append_members(ledger: Ledger, request: pb.AppendMembersRequest) -> pb.AppendMembersResponse:
    outcomes = [_outcome(ledger, _append_member(ledger, item)) for item in request.items]
    return pb.AppendMembersResponse(outcomes=outcomes, num_overflowed=ledger.num_overflowed)


def _append_turns(ledger: Ledger, request: pb.AppendTurnsRequest) -> pb.AppendTurnsResponse:
    answer = pb.AppendTurnsResponse()
    for item in request.items:
        reason = _append_turn(ledger, item)
        status = pb.APPEND_STATUS_REJECTED if reason else pb.APPEND_STATUS_APPENDED
        if reason == "DUPLICATE":
            reason, status = "", pb.APPEND_STATUS_DUPLICATE
        answer.outcomes.add(status=status, reason=reason)
    return answer


def _append_turn(ledger: Ledger, item: pb.TurnItem) -> str:
    """Keep a turn; return an empty string, or why it is not kept."""
    record, reason = _played_task(ledger, item.lease_id)
    if record is None:
        return reason
    members, turn = record.assembly.members, item.turn
    if not 0 <= item.member < len(members):
        return Reason.WRONG_SIZE
    member = members[item.member]
    if member.facts:
        return Reason.LEASE_LOST
    is_other = bool(member.turns) and member.turns[0].trajectory_id != turn.trajectory_id
    if turn.turn == 0 and is_other:
        member.turns, is_other = [], False
    if is_other or turn.turn > len(member.turns):
        return Reason.STEP_GAP
    bare = pb.RecordedTurn()
    bare.CopyFrom(turn)
    bare.ClearField("snapshot")
    if turn.turn < len(member.turns):
        is_same = member.turns[turn.turn] == bare
        return "DUPLICATE" if is_same else Reason.DIGEST_MISMATCH
    kept = pb.GetTurnsResponse(turns=[*member.turns, bare], snapshot=turn.snapshot)
    if kept.ByteSize() > ledger.limits.max_lease_bytes:
        member.turns = []
        return Reason.TOO_LARGE
    member.turns.append(bare)
    member.snapshot = turn.snapshot
    record.has_progress = True
    return ""


def _played_task(ledger: Ledger, lease_id: str) -> tuple[Record | None, str]:
    """Return the open task whose last lease this is, or why there is none."""
    name = parse_lease(lease_id)
    if name is None or name.kind is not Kind.TASK:
        return None, Reason.LEASE_LOST
    record = ledger.records.get(name.task_id)
    if record is None:
        return None, Reason.UNKNOWN_TASK
    is_open = record.state in (GroupState.LEASED, GroupState.OFFERED)
    is_held = record.lease_id == lease_id and is_open
    return (record, "") if is_held else (None, Reason.LEASE_LOST)


def _get_turns(ledger: Ledger, request: pb.GetTurnsRequest) -> pb.GetTurnsResponse:
    record, _ = _played_task(ledger, request.lease_id)
    members = record.assembly.members if record else []
    if not 0 <= request.member < len(members):
        return pb.GetTurnsResponse()
    member = members[request.member]
    snapshot = member.snapshot if member.turns else b""
    return pb.GetTurnsResponse(turns=member.turns, snapshot=snapshot)


def _append_groups(ledger: Ledger, request: pb.AppendGroupsRequest) -> pb.AppendGroupsResponse:
    """Append scored groups; the servicer appends those that were played member by member."""
    return pb.AppendGroupsResponse(
        outcomes=[_outcome(ledger, _append_scored(ledger, item)) for item in request.items]
    )


def _outcome(ledger: Ledger, reason: str) -> pb.AppendOutcome:
    """Count the outcome of an append unless it was appended (no reason); return it."""
    if not reason:
        return pb.AppendOutcome(status=pb.APPEND_STATUS_APPENDED)
    if reason == "DUPLICATE":
        ledger.num_duplicates += 1
        return pb.AppendOutcome(status=pb.APPEND_STATUS_DUPLICATE)
    ledger.num_rejected += 1
    return pb.AppendOutcome(status=pb.APPEND_STATUS_REJECTED, reason=reason)


def _append_member(ledger: Ledger, item: pb.MemberItem) -> str:
    """Append a finished member; return an empty string, or why it is not appended."""
    name = parse_lease(item.lease_id)
    if name is None or name.kind is not Kind.TASK:
        return Reason.LEASE_LOST
    record = ledger.records.get(name.task_id)
    if record is None:
        return Reason.UNKNOWN_TASK
    number, members = item.member, record.assembly.members
    facts, payload = pack_member(item.trajectory)
    if not 0 <= number < len(members):
        return Reason.WRONG_SIZE
    if record.is_refused:
        return Reason.NO_ROOM
    if finished := members[number].facts:
        return "DUPLICATE" if finished.digest == facts.digest else Reason.DIGEST_MISMATCH
    if record.lease_id != item.lease_id or record.state not in (
        GroupState.LEASED,
        GroupState.OFFERED,
    ):
        return Reason.LEASE_LOST
    if not ledger.are_announced(facts.versions):
        return Reason.FUTURE_VERSION
    if any(
        facts.trajectory_id == m.facts.trajectory_id for m in record.assembly.finished if m.facts
    ):
        return Reason.TRAJECTORY_REPEATED
    if record.assembly.num_bytes + len(payload) > ledger.limits.max_lease_bytes:
        return Reason.TOO_LARGE
    ledger.count_wasted(record, item.num_discarded, DropReason.MEMBER_RETRIED)
    ledger.finish_member(record, number, facts, payload)
    return Reason.NO_ROOM if record.is_refused else ""


def _append_scored(ledger: Ledger, item: pb.AppendItem) -> str:
    """Append a group that a scorer scored; the scorer acknowledges its group lease afterwards.

    Return an empty string, or why the group is not appended.
    """
    group, payload = pack_group(item.group)
    record = ledger.records.get(group.group_id)
    if record is None or record.purpose is not Purpose.TRAINING:
        return Reason.UNKNOWN_TASK
    if not record.digest:
        return Reason.LEASE_LOST
    if record.digest != group.digest:
        return Reason.DIGEST_MISMATCH
    if record.is_scored:
        return "DUPLICATE"
    held = ledger.held_group(item.lease_id)
    is_held = held is not None and held[:2] == (record, Stage.UNSCORED)
    if held is None or not is_held or record.state is not GroupState.UNSCORED:
        return Reason.LEASE_LOST
    record.is_scored = True
    ledger.move(record, GroupState.SCORED)
    ledger.add_entry(record, Stage.SCORED, payload, item.priority)
    if held[2].order in ledger.ready[Stage.UNSCORED]:
        # The lease had expired and nobody took the group over; nobody needs to score it now.
        ledger.remove_entry(record, Stage.UNSCORED)
    return ""


def _lease_groups(ledger: Ledger, request: pb.LeaseGroupsRequest) -> pb.LeaseGroupsResponse:
    stage = Stage(request.stage)
    max_staleness = request.max_staleness if request.HasField("max_staleness") else None
    ready, ready_now = ledger.ready[stage], list[Record]()
    for record in ledger.ready_in_turn(stage, request.selection):
        if len(ready_now) == request.max_groups:
            break
        if not record.task_id.startswith(request.task_id_prefix):
            continue
        if stage is Stage.SCORED and ledger.is_stale(record, max_staleness):
            ledger.drop_entry(record, stage, DropReason.STALE)
            continue
        ready_now.append(record)
    answer = pb.LeaseGroupsResponse(empty_reason=pb.EMPTY_REASON_NOT_EMPTY, num_ready=len(ready))
    if len(ready_now) < max(1, request.min_groups):
        answer.empty_reason = pb.EMPTY_REASON_TOO_FEW if ready_now else pb.EMPTY_REASON_NO_GROUPS
        return answer
    fitting = ledger.fitting([record.entries[stage] for record in ready_now])
    answer.is_cut = len(fitting) < len(ready_now)
    for record in ready_now[: len(fitting)]:
        entry = record.entries[stage]
        del ready[entry.order]
        entry.lease_id = ledger.new_lease(KIND_OF_STAGE[stage], record.task_id, request.lease_s)
        entry.worker = request.worker
        entry.is_innocent = False
        entry.num_deliveries += 1
        ledger.num_redelivered += entry.num_deliveries > 1
        if stage is not Stage.UNSCORED:
            ledger.move(record, GroupState.TRAINING)
        answer.leases.append(_group_lease(entry, request.lease_s))
    answer.num_ready = len(ready)
    return answer


def _group_lease(entry: StagedGroup, lease_s: float) -> pb.GroupLease:
    lease = pb.GroupLease(
        lease_id=entry.lease_id, num_deliveries=entry.num_deliveries, expires_in_s=lease_s
    )
    lease.group.ParseFromString(entry.payload)
    return lease


def _acknowledge(ledger: Ledger, request: pb.AcknowledgeRequest) -> pb.AcknowledgeResponse:
    answer = pb.AcknowledgeResponse()
    for item in request.items:
        reason = _acknowledge_one(ledger, item)
        answer.outcomes.add(lease_id=item.lease_id, acknowledged=not reason, reason=reason)
    return answer


def _acknowledge_one(ledger: Ledger, item: pb.AcknowledgeItem) -> str:
    """Acknowledge a lease. Return an empty string, or the reason if it is not acknowledged."""
    held = ledger.held_group(item.lease_id)
    if held is None:
        return Reason.LEASE_LOST
    record, stage, entry = held
    is_consumed = item.outcome == pb.OUTCOME_CONSUMED
    final_state = GroupState.CONSUMED if is_consumed else GroupState.DROPPED
    if stage is Stage.UNSCORED and is_consumed:
        if not record.is_scored:
            return Reason.NOT_SCORED
    elif stage is Stage.UNSCORED and record.is_scored:
        return Reason.ALREADY_SCORED
    elif record.state in (GroupState.CONSUMED, GroupState.DROPPED):
        if record.state is final_state:
            return ""
        is_consumed = record.state is GroupState.CONSUMED
        return Reason.ALREADY_CONSUMED if is_consumed else Reason.ALREADY_DROPPED
    elif is_consumed:
        ledger.consume(record)
    else:
        ledger.drop(record, item.reason)
    if entry.is_present:
        ledger.remove_entry(record, stage)
    return ""


def _return(ledger: Ledger, request: pb.ReturnRequest) -> pb.ReturnResponse:
    answer = pb.ReturnResponse()
    for item in request.items:
        was_returned, was_dropped = _return_one(ledger, item)
        answer.num_returned += was_returned
        answer.num_dropped += was_dropped
    return answer


def _return_one(ledger: Ledger, item: pb.ReturnItem) -> tuple[bool, bool]:
    """Return whether the lease was returned, and whether its task or group was dropped for good."""
    if record := ledger.held_task(item.lease_id):
        ledger.count_wasted(record, item.num_trajectories, item.reason)
        was_dropped = ledger.release(
            record, item.reason, failed=item.failed, members=item.failed_members
        )
        record.lease_id = ""
        return True, was_dropped
    held = ledger.held_group(item.lease_id)
    if held is None or item.lease_id not in ledger.deadlines:
        return False, False
    record, stage, entry = held
    was_dropped = ledger.redeliver(
        record, stage, item.reason, failed=item.failed, set_aside=item.set_aside
    )
    entry.lease_id = ""
    return True, was_dropped


def _extend(ledger: Ledger, request: pb.ExtendRequest) -> pb.ExtendResponse:
    answer = pb.ExtendResponse()
    for lease_id in request.lease_ids:
        if ledger.held_task(lease_id) or ledger.revive_task(lease_id):
            ledger.deadlines[lease_id] = ledger.now + request.lease_s
        elif (held := ledger.held_group(lease_id)) and held[2].is_present:
            ledger.hold(held[0], held[1], request.lease_s)
        else:
            answer.lost_lease_ids.append(lease_id)
    return answer


def _list_leases(ledger: Ledger, request: pb.ListLeasesRequest) -> pb.ListLeasesResponse:
    stage = Stage(request.stage)
    held = (ledger.held_group(lease_id) for lease_id in ledger.deadlines)
    entries = [group[2] for group in held if group and group[1] is stage]
    own = sorted((e.order, e.lease_id) for e in entries if e.worker == request.worker)
    return pb.ListLeasesResponse(lease_ids=[lease_id for _, lease_id in own])


def _reopen_leases(ledger: Ledger, request: pb.ReopenLeasesRequest) -> pb.ReopenLeasesResponse:
    groups = [ledger.held_group(lease_id) for lease_id in request.lease_ids]
    held = [group for group in groups if group is not None and group[2].is_present]
    if len(held) < len(groups):
        present = {entry.lease_id for _, _, entry in held}
        lost = [lease_id for lease_id in request.lease_ids if lease_id not in present]
        return pb.ReopenLeasesResponse(lost_lease_ids=lost)
    fitting = ledger.fitting([entry for _, _, entry in held])
    for record, stage, entry in held[: len(fitting)]:
        ledger.hold(record, stage, request.lease_s)
        entry.is_innocent = True
    return pb.ReopenLeasesResponse(
        leases=[_group_lease(entry, request.lease_s) for entry in fitting],
        is_cut=len(fitting) < len(held),
    )


def _advance_policy(ledger: Ledger, request: pb.AdvancePolicyRequest) -> pb.AdvancePolicyResponse:
    version, current = POLICY_VERSION.from_proto(request.policy_version), ledger.policy
    is_known = version != current and version.lineage in ledger.lineages
    if is_known and (current is None or current.lineage != version.lineage or version < current):
        raise refusal(Reason.VERSION_NOT_NEWER, str(current))
    ledger.policy = version
    ledger.lineages[version.lineage] = version.number
    ledger.max_outstanding = request.max_outstanding_groups
    for lease_id in request.trained_lease_ids:
        held = ledger.held_group(lease_id)
        if held is None or held[1] is not Stage.SCORED or not held[2].is_present:
            continue
        record, stage, entry = held
        if entry.order in ledger.ready[stage]:
            ledger.hold(record, stage, ledger.limits.lease_s)
        if record.state is GroupState.TRAINING:
            ledger.move(record, GroupState.TRAINED)
        entry.is_innocent = True
    return pb.AdvancePolicyResponse(credits=ledger.credits)


def _get_stats(ledger: Ledger, _: pb.GetStatsRequest) -> pb.GetStatsResponse:
    policy = ledger.policy
    stats = pb.ReplayStats(
        training=ledger.counts[Purpose.TRAINING],
        evaluation=ledger.counts[Purpose.EVALUATION],
        policy_version=POLICY_VERSION.to_proto(policy) if policy is not None else None,
        max_outstanding_groups=ledger.max_outstanding,
        credits=ledger.credits,
        num_redelivered=ledger.num_redelivered,
        num_dead_letters=len(ledger.dead),
        num_duplicate_appends=ledger.num_duplicates,
        num_rejected_appends=ledger.num_rejected,
        cursor=ledger.cursor,
        settled_cursor=ledger.pages[min(ledger.pages)][0] if ledger.pages else ledger.cursor,
        store="model",
    )
    stats.training.oldest_s.update(ledger.oldest_s(Purpose.TRAINING))
    stats.evaluation.oldest_s.update(ledger.oldest_s(Purpose.EVALUATION))
    return pb.GetStatsResponse(stats=stats)


def _peek(ledger: Ledger, request: pb.PeekRequest) -> pb.PeekResponse:
    stage = Stage(request.stage)
    ready = ledger.ready[stage]
    payloads = [ready[order].entries[stage].payload for order in sorted(ready)]
    return pb.PeekResponse(
        groups=map(trajectory_pb2.Group.FromString, payloads[: request.max_groups])
    )


def _list_dead_letters(
    ledger: Ledger, request: pb.ListDeadLettersRequest
) -> pb.ListDeadLettersResponse:
    answer = pb.ListDeadLettersResponse()
    for group_id, dead in list(ledger.dead.items())[: request.max_groups]:
        answer.dead_letters.add(
            group_id=group_id,
            stage=trajectory_pb2.Stage.Name(int(dead.stage)),
            reason=dead.reason,
            num_deliveries=dead.num_deliveries,
            group=trajectory_pb2.Group.FromString(dead.payload),
        )
    return answer


def _requeue(ledger: Ledger, request: pb.RequeueRequest) -> pb.RequeueResponse:
    for group_id in request.group_ids:
        if group_id not in ledger.dead:
            raise refusal(Reason.GROUP_NOT_FOUND, group_id)
    for group_id in request.group_ids:
        ledger.requeue(group_id)
    return pb.RequeueResponse(num_requeued=len(request.group_ids))


_TRANSITIONS: Mapping[type[Message], Callable[[Ledger, Any], Message]] = MappingProxyType(
    {
        pb.OfferTasksRequest: _offer_tasks,
        pb.LeaseTasksRequest: _lease_tasks,
        pb.AppendMembersRequest: _append_members,
        pb.AppendTurnsRequest: _append_turns,
        pb.GetTurnsRequest: _get_turns,
        pb.AppendGroupsRequest: _append_groups,
        pb.LeaseGroupsRequest: _lease_groups,
        pb.AcknowledgeRequest: _acknowledge,
        pb.ReturnRequest: _return,
        pb.ExtendRequest: _extend,
        pb.ListLeasesRequest: _list_leases,
        pb.ReopenLeasesRequest: _reopen_leases,
        pb.AdvancePolicyRequest: _advance_policy,
        pb.GetStatsRequest: _get_stats,
        pb.PeekRequest: _peek,
        pb.ListDeadLettersRequest: _list_dead_letters,
        pb.RequeueRequest: _requeue,
        registry_pb.AnnounceRequest: lambda ledger, request: ledger.instances.announce(
            request, ledger.now
        ),
        registry_pb.WithdrawRequest: lambda ledger, request: ledger.instances.withdraw(
            request, ledger.now
        ),
        registry_pb.AdmitRequest: lambda ledger, request: ledger.instances.admit(
            request, ledger.now
        ),
        registry_pb.ListInstancesRequest: lambda ledger, request: ledger.instances.list_instances(
            request, ledger.now
        ),
    }
)
