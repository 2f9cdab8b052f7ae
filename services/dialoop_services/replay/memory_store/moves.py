"""What one item of a request does to a run in memory."""

from __future__ import annotations

from collections.abc import Sequence

from dialoop.trajectory import Purpose, Stage

from dialoop_services.replay.memory_store.run import KIND_OF_STAGE, Record, Run
from dialoop_services.replay.refusals import batch_too_large
from dialoop_services.replay.store import (
    Acknowledgement,
    Appended,
    AppendStatus,
    GivenBack,
    GroupLease,
    NewGroup,
    Outcome,
    Reopened,
    State,
)

DUPLICATE = Appended(status=AppendStatus.DUPLICATE)
_APPENDED = Appended(status=AppendStatus.APPENDED)


def _rejected(reason: str) -> Appended:
    return Appended(status=AppendStatus.REJECTED, reason=reason)


def append_played(state: Run, stage: Stage, group: NewGroup) -> Appended:
    """Take in what a collector played; its task lease is used up."""
    record = state.records.get(group.task_id)
    purpose = Purpose.EVALUATION if stage is Stage.EVALUATION else Purpose.TRAINING
    if record is None or record.task.purpose is not purpose:
        return _rejected("UNKNOWN_TASK")
    if record.group_id == group.group_id:
        return DUPLICATE if record.digest == group.digest else _rejected("DIGEST_MISMATCH")
    named = f"{group.task_id}#{record.attempt}" == group.group_id
    if state.held_task(group.lease_id) is not record or not named:
        return _rejected("LEASE_LOST")
    if group.num_trajectories != record.task.num_trajectories:
        return _rejected("WRONG_SIZE")
    if not all(map(state.is_known, group.versions)):
        return _rejected("FUTURE_VERSION")
    state.deadlines.pop(record.lease_id, None)
    record.lease_id = ""
    record.group_id, record.digest, record.versions = group.group_id, group.digest, group.versions
    state.forget_task(record)
    state.move(record, State.UNSCORED if stage is Stage.UNSCORED else State.SCORED)
    state.add_entry(record, stage, group.payload)
    state.count_played(record, group.num_discarded)
    return _APPENDED


def append_scored(state: Run, stage: Stage, group: NewGroup) -> Appended:
    """Take in what a scorer scored; its group lease is still to be acknowledged."""
    record = state.records.get(group.task_id)
    if record is None or record.task.purpose is not Purpose.TRAINING:
        return _rejected("UNKNOWN_TASK")
    if record.group_id != group.group_id:
        return _rejected("LEASE_LOST")
    if record.digest != group.digest:
        return _rejected("DIGEST_MISMATCH")
    if record.is_scored:
        return DUPLICATE
    held = state.held_group(group.lease_id)
    if held is None or held[:2] != (record, Stage.UNSCORED) or record.state is not State.UNSCORED:
        return _rejected("LEASE_LOST")
    record.is_scored = True
    state.move(record, State.SCORED)
    state.add_entry(record, stage, group.payload)
    if held[2].order in state.ready[Stage.UNSCORED]:
        # The lease had expired and nobody took over: nobody has to, now.
        state.remove_entry(record, Stage.UNSCORED)
    return _APPENDED


def lease_group(
    state: Run, record: Record, stage: Stage, *, worker: str, deadline: float
) -> GroupLease:
    """Hand one ready group out."""
    entry = record.entries[stage]
    del state.ready[stage][entry.order]
    entry.lease_id = state.new_lease(KIND_OF_STAGE[stage], record.task.task_id, deadline)
    entry.worker = worker
    entry.is_innocent = False
    entry.num_deliveries += 1
    state.num_redelivered += entry.num_deliveries > 1
    if stage is not Stage.UNSCORED:
        state.move(record, State.TRAINING)
    return GroupLease(
        lease_id=entry.lease_id, num_deliveries=entry.num_deliveries, payload=entry.payload
    )


def reopen(state: Run, lease_ids: Sequence[str], deadline: float, max_bytes: int) -> Reopened:
    """Hand out once more what these leases hold."""
    found = {lease_id: state.held_group(lease_id) for lease_id in lease_ids}
    held = [one for one in found.values() if one is not None and one[2].is_present]
    if len(held) < len(found):
        present = {entry.lease_id for _, _, entry in held}
        return Reopened(leases=(), lost=tuple(one for one in found if one not in present))
    if sum(len(entry.payload) for _, _, entry in held) > max_bytes:
        raise batch_too_large()
    for record, stage, entry in held:
        state.hold(record, stage, deadline)
        entry.is_innocent = True
    return Reopened(
        leases=tuple(
            GroupLease(
                lease_id=entry.lease_id, num_deliveries=entry.num_deliveries, payload=entry.payload
            )
            for _, _, entry in held
        )
    )


def acknowledge(state: Run, item: Acknowledgement) -> str:
    """If the lease is acknowledged, now or before; else the reason it is not."""
    held = state.held_group(item.lease_id)
    if held is None:
        return "LEASE_LOST"
    record, stage, entry = held
    if stage is Stage.UNSCORED and item.outcome is Outcome.CONSUMED:
        if not record.is_scored:
            return "NOT_SCORED"
    elif stage is Stage.UNSCORED and record.is_scored:
        return "ALREADY_SCORED"
    elif state.is_final(record):
        same = record.state is State[item.outcome.name]
        return "" if same else f"ALREADY_{record.state.name}"
    elif item.outcome is Outcome.CONSUMED:
        state.consume(record)
    else:
        state.drop(record, item.reason)
    if entry.is_present:
        state.remove_entry(record, stage)
    return ""


def give_back(state: Run, item: GivenBack) -> tuple[bool, bool]:
    """Whether the lease was returned, and whether its task or group was given up."""
    if record := state.held_task(item.lease_id):
        tally = state.tally(record)
        tally.generated += item.num_trajectories
        if item.num_trajectories:
            tally.dropped[item.reason] += item.num_trajectories
        return True, state.reissue(record, item.reason, failed=item.failed)
    held = state.held_group(item.lease_id)
    if held is None or item.lease_id not in state.deadlines:
        return False, False
    record, stage, entry = held
    dropped = state.redeliver(
        record, stage, item.reason, failed=item.failed, set_aside=item.set_aside
    )
    entry.lease_id = ""
    return True, dropped
