"""One run's ledger in memory: its records and the transitions between their states.

`redis_store` does the same in Lua (`scripts/ledger.lua`), function for function.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dialoop.reasons import DropReason
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1.replay_service_pb2 import LedgerCounts
from dialoop_learning.rl.staleness import is_stale
from dialoop_services.replay.store import Kind, MemberFacts, QueueLimits, parse_lease

from tests.support.queue_model.assembly import Assembly, GroupClosing
from tests.support.queue_model.instances import Instances

KIND_OF_STAGE = {
    Stage.UNSCORED: Kind.UNSCORED,
    Stage.SCORED: Kind.SCORED,
    Stage.EVALUATION: Kind.EVALUATION,
}
STAGE_OF_KIND = {kind: stage for stage, kind in KIND_OF_STAGE.items()}


_WAITING_AT = {
    Purpose.TRAINING: {"unscored": Stage.UNSCORED, "scored": Stage.SCORED},
    Purpose.EVALUATION: {"scored": Stage.EVALUATION},
}


class GroupState(StrEnum):
    """State of a task and its group; the value is the field of LedgerCounts that counts it."""

    OFFERED = "num_tasks_offered"
    LEASED = "num_groups_leased"
    UNSCORED = "num_groups_unscored"
    SCORED = "num_groups_scored"
    TRAINING = "num_groups_training"
    TRAINED = "num_groups_trained"
    CONSUMED = "num_groups_consumed"
    DROPPED = "num_groups_dropped"


_OUTSTANDING = (GroupState.LEASED, GroupState.UNSCORED, GroupState.SCORED, GroupState.TRAINING)


@dataclass(slots=True, kw_only=True)
class StagedGroup:
    """A group in one stage, since it came. `lease_id` keeps the last lease, also after it left."""

    order: int
    payload: bytes
    since_ms: int
    lease_id: str = ""
    worker: str = ""
    priority: float = 0.0
    num_deliveries: int = 0
    num_failures: int = 0
    # Its work was finished once under the present lease, so the group did not stop its holder.
    is_innocent: bool = False
    is_present: bool = True


@dataclass(slots=True, kw_only=True)
class Record:
    """A task and its group; `payload` is the beginning of the serialised group, with the task.

    `lease_id` keeps the last task lease, also after it ran out; `has_progress` says whether a
    member was finished under it, and `expired_members` which open members failed as it ran out.
    `digest` is that of the closed group. `is_refused`: it found no room in the queue.
    """

    task_id: str
    purpose: Purpose
    assembly: Assembly
    payload: bytes
    order: int
    offered_ms: int
    leased_ms: int = 0
    state: GroupState = GroupState.OFFERED
    attempt: int = 1
    lease_id: str = ""
    has_progress: bool = False
    expired_members: list[int] = field(default_factory=list)
    digest: str = ""
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_scored: bool = False
    is_refused: bool = False
    entries: dict[Stage, StagedGroup] = field(default_factory=dict)
    page: int | None = None

    @property
    def num_finished(self) -> int:
        """Return the number of its trajectories in the queue; once closed, the group's size."""
        return len(self.assembly.finished)


@dataclass(slots=True, kw_only=True)
class DeadGroup:
    """A group that is set aside, with the reason and the number of its deliveries."""

    record: Record
    stage: Stage
    reason: str
    num_deliveries: int
    payload: bytes


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The state of a run; each method is one transition. `now` is the time of this request.

    num_overflowed: groups that were dropped for want of room, by reason.
    """

    limits: QueueLimits
    token: int
    now: float = 0.0
    order: int = 0
    cursor: str = ""
    # Where each page of tasks began, and how many of it have not ended.
    pages: dict[int, tuple[str, int]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    offered: dict[Purpose, list[tuple[int, str]]] = field(
        default_factory=lambda: {purpose: [] for purpose in Purpose}
    )
    ready: dict[Stage, dict[int, Record]] = field(
        default_factory=lambda: {stage: {} for stage in Stage}
    )
    deadlines: dict[str, float] = field(default_factory=dict)
    dead: dict[str, DeadGroup] = field(default_factory=dict)
    finished: deque[str] = field(default_factory=deque)
    policy: PolicyVersion | None = None
    lineages: dict[str, int] = field(default_factory=dict)
    max_outstanding: int = 0
    counts: dict[Purpose, LedgerCounts] = field(
        default_factory=lambda: {purpose: LedgerCounts() for purpose in Purpose}
    )
    num_redelivered: int = 0
    num_duplicates: int = 0
    num_rejected: int = 0
    num_overflowed: Counter[str] = field(default_factory=Counter)
    instances: Instances = field(default_factory=Instances)

    @property
    def credits(self) -> int:
        """Return how many training groups may still be started."""
        counts = self.counts[Purpose.TRAINING]
        num_outstanding: int = sum(getattr(counts, state) for state in _OUTSTANDING)
        free = self.max_outstanding - num_outstanding
        if self.limits.max_waiting_groups and self.limits.overflow == "block":
            # Those that are being played will wait too.
            room = self.limits.max_waiting_groups - self.num_waiting - counts.num_groups_leased
            free = min(free, room)
        return max(0, free)

    @property
    def num_waiting(self) -> int:
        """Return how many training groups are played and not yet with the trainer."""
        counts = self.counts[Purpose.TRAINING]
        return counts.num_groups_unscored + counts.num_groups_scored

    @property
    def now_ms(self) -> int:
        """Return the time in ms, as Redis counts it."""
        return round(self.now * 1000)

    def oldest_s(self, purpose: Purpose) -> dict[str, float]:
        """Return the age of the oldest task or group of each state, as the proto says."""
        since = {}
        if offered := self.offered[purpose]:
            since["offered"] = self.records[offered[0][1]].offered_ms
        leased = [
            record.leased_ms
            for record in map(self.held_task, self.deadlines)
            if record and record.purpose is purpose
        ]
        if leased:
            since["leased"] = min(leased)
        for state, stage in _WAITING_AT[purpose].items():
            if ready := self.ready[stage]:
                since[state] = ready[min(ready)].entries[stage].since_ms
        return {state: (self.now_ms - ms) / 1000 for state, ms in since.items()}

    def counts_of(self, record: Record) -> LedgerCounts:
        """Return the counts of the record's purpose."""
        return self.counts[record.purpose]

    def next_order(self) -> int:
        """Return a number that is larger than all before."""
        self.order += 1
        return self.order

    def new_lease(self, kind: Kind, task_id: str, lease_s: float) -> str:
        """Return a new lease that runs for `lease_s`."""
        self.token += 1
        lease_id = f"{kind}/{self.token}/{task_id}"
        self.deadlines[lease_id] = self.now + lease_s
        return lease_id

    def count(self, record: Record, state: GroupState, by: int) -> None:
        """Add `by` to the groups in a state; `drop` counts drops, by reason."""
        counts = self.counts_of(record)
        if state is not GroupState.DROPPED:
            setattr(counts, state, getattr(counts, state) + by)

    def move(self, record: Record, state: GroupState) -> None:
        """Change the record's state, and the counts with it."""
        self.count(record, record.state, -1)
        self.count(record, state, 1)
        record.state = state
        if state is GroupState.LEASED:
            record.leased_ms = self.now_ms

    def push_task(self, record: Record) -> None:
        """Make the task leasable, at its old place in the order."""
        heapq.heappush(self.offered[record.purpose], (record.order, record.task_id))

    def pull_task(self, record: Record) -> None:
        """Take an offered task out of those that are leasable."""
        self.offered[record.purpose].remove((record.order, record.task_id))
        heapq.heapify(self.offered[record.purpose])

    def drop(self, record: Record, reason: str) -> None:
        """Drop the group for good and count it under the reason; this frees its credit."""
        self.move(record, GroupState.DROPPED)
        counts = self.counts_of(record)
        _add(counts.num_groups_dropped, reason, 1)
        counts.num_trajectories_live -= record.num_finished
        _add(counts.num_trajectories_dropped, reason, record.num_finished)
        self.finish(record)

    def count_wasted(self, record: Record, num_trajectories: int, reason: str) -> None:
        """Count trajectories that were played under a task lease and not appended."""
        counts = self.counts_of(record)
        counts.num_trajectories_generated += num_trajectories
        _add(counts.num_trajectories_dropped, reason, num_trajectories)

    def consume(self, record: Record) -> None:
        """Mark the group as consumed: it is in a checkpoint."""
        self.move(record, GroupState.CONSUMED)
        self.counts_of(record).num_trajectories_live -= record.num_finished
        self.counts_of(record).num_trajectories_consumed += record.num_finished
        self.finish(record)

    def finish(self, record: Record) -> None:
        """Note that the task has ended, and forget the oldest of those that have, if too many.

        A dead letter is kept until it is forgotten, and then ends a second time.
        """
        if record.page is not None:
            cursor, left = self.pages.pop(record.page)
            if left > 1:
                self.pages[record.page] = (cursor, left - 1)
            record.page = None
        self.finished.append(record.task_id)
        while len(self.finished) > self.limits.max_finished:
            oldest = self.records.get(self.finished.popleft())
            if oldest is None or oldest is record or oldest.task_id in self.dead:
                continue
            if oldest.state in (GroupState.CONSUMED, GroupState.DROPPED):
                for stage, entry in oldest.entries.items():
                    if entry.is_present:
                        self.remove_entry(oldest, stage)
                del self.records[oldest.task_id]

    def finish_member(self, record: Record, index: int, facts: MemberFacts, payload: bytes) -> None:
        """Keep a finished member, and close its group if no other is to be played."""
        member, counts = record.assembly.members[index], self.counts_of(record)
        member.facts, member.payload, member.turns = facts, payload, []
        record.has_progress = True
        counts.num_trajectories_generated += 1
        counts.num_trajectories_live += 1
        counts.num_trajectories_waiting += 1
        self.close(record, DropReason.MEMBER_FAILED)

    def release(
        self, record: Record, reason: str, *, failed: bool, members: Collection[int] = ()
    ) -> bool:
        """End the task's lease and offer the task again for the members that are still open.

        `members` are those that failed, none for all. Return True if the group was dropped for
        `reason` instead.
        """
        self.deadlines.pop(record.lease_id, None)
        if failed:
            is_expired = reason == DropReason.LEASE_EXPIRED
            record.assembly.fail(members, keeps_turns=is_expired)
        if self.close(record, reason):
            return record.state is GroupState.DROPPED
        record.attempt += 1
        self.move(record, GroupState.OFFERED)
        self.push_task(record)
        return False

    def close(self, record: Record, reason: str) -> bool:
        """Close the group if the rule says so, or drop it for `reason`; return whether it ended."""
        assembly, counts = record.assembly, self.counts_of(record)
        closing = assembly.closing
        if closing is GroupClosing.OPEN:
            return False
        if record.state is GroupState.OFFERED:  # the lease had run out, and nobody took over
            self.pull_task(record)
        self.deadlines.pop(record.lease_id, None)
        counts.num_trajectories_waiting -= record.num_finished
        payload = record.payload + assembly.take_payload()
        record.payload, record.versions = b"", assembly.versions
        if closing is GroupClosing.HOPELESS:
            self.drop(record, reason)
            return True
        record.digest = assembly.digest
        counts.num_groups_closed_short += closing is GroupClosing.SHORT
        if record.purpose is Purpose.EVALUATION:
            self.move(record, GroupState.SCORED)
            self.add_entry(record, Stage.EVALUATION, payload)
        elif not record.versions:
            self.drop(record, DropReason.NO_TRAINABLE_TOKEN)
        elif not self.make_room():
            record.is_refused = True
            self.num_overflowed[DropReason.NO_ROOM] += 1
            self.drop(record, DropReason.NO_ROOM)
        else:
            self.move(record, GroupState.UNSCORED)
            self.add_entry(record, Stage.UNSCORED, payload)
        return True

    def make_room(self) -> bool:
        """Return whether one more group may wait, after dropping the oldest where overflow says so.

        A group that a scorer holds is not dropped.
        """
        most, overflow = self.limits.max_waiting_groups, self.limits.overflow
        if not most or overflow == "block":
            return True
        while overflow == "drop_oldest" and self.num_waiting >= most:
            if (oldest := self.oldest_waiting()) is None:
                break
            self.num_overflowed[DropReason.DROPPED_OLDEST] += 1
            self.drop_entry(*oldest, DropReason.DROPPED_OLDEST)
        return self.num_waiting < most

    def oldest_waiting(self) -> tuple[Record, Stage] | None:
        """Return the group that waited longest for the scorer or the trainer, with its stage."""
        heads = [
            (ready[min(ready)], stage)
            for stage in (Stage.SCORED, Stage.UNSCORED)
            if (ready := self.ready[stage])
        ]
        # Its order in the first stage is the order in which groups were played.
        return min(heads, key=lambda head: head[0].entries[Stage.UNSCORED].order, default=None)

    def drop_entry(self, record: Record, stage: Stage, reason: str) -> None:
        """Drop a group that nobody holds, with its entry in the stage where it is ready."""
        self.remove_entry(record, stage)
        record.entries[stage].lease_id = ""
        self.drop(record, reason)

    def add_entry(
        self, record: Record, stage: Stage, payload: bytes, priority: float = 0.0
    ) -> None:
        """Put the group at the end of a stage."""
        entry = StagedGroup(
            order=self.next_order(), payload=payload, since_ms=self.now_ms, priority=priority
        )
        record.entries[stage] = entry
        self.ready[stage][entry.order] = record

    def remove_entry(self, record: Record, stage: Stage) -> None:
        """Take the group out of a stage for good."""
        entry = record.entries[stage]
        self.ready[stage].pop(entry.order, None)
        self.deadlines.pop(entry.lease_id, None)
        entry.is_present = False
        entry.payload = b""

    def redeliver(
        self,
        record: Record,
        stage: Stage,
        reason: str,
        *,
        failed: bool,
        set_aside: bool = False,
    ) -> bool:
        """Make a leased group leasable again; return True if it became a dead letter instead."""
        entry = record.entries[stage]
        self.deadlines.pop(entry.lease_id, None)
        if stage is Stage.UNSCORED and record.is_scored:
            # The scored copy is in the queue, so nobody needs the unscored one.
            self.remove_entry(record, stage)
            return False
        entry.num_failures += failed
        if set_aside or entry.num_failures >= self.limits.max_deliveries:
            self.add_dead_letter(record, stage, reason)
            return True
        if record.state in (GroupState.TRAINING, GroupState.TRAINED):
            self.move(record, GroupState.SCORED)
        self.ready[stage][entry.order] = record
        return False

    def add_dead_letter(self, record: Record, stage: Stage, reason: str) -> None:
        """Set the group aside as a dead letter."""
        entry = record.entries[stage]
        self.dead[record.task_id] = DeadGroup(
            record=record,
            stage=stage,
            reason=reason,
            num_deliveries=entry.num_deliveries,
            payload=entry.payload,
        )
        self.remove_entry(record, stage)
        entry.lease_id = ""
        self.drop(record, DropReason.DEAD_LETTER)
        while len(self.dead) > self.limits.max_dead_letters:
            self.forget_letter(next(iter(self.dead)))

    def forget_letter(self, group_id: str) -> None:
        """Delete a dead letter; its group stays dropped, with DEAD_LETTER_FORGOTTEN as reason."""
        record = self.dead.pop(group_id).record
        counts = self.uncount_dead(record)
        _add(counts.num_groups_dropped, DropReason.DEAD_LETTER_FORGOTTEN, 1)
        _add(
            counts.num_trajectories_dropped,
            DropReason.DEAD_LETTER_FORGOTTEN,
            record.num_finished,
        )
        self.finish(record)

    def uncount_dead(self, record: Record) -> LedgerCounts:
        """Return the record's counts after taking it out of the dead letters."""
        counts = self.counts_of(record)
        _add(counts.num_groups_dropped, DropReason.DEAD_LETTER, -1)
        _add(counts.num_trajectories_dropped, DropReason.DEAD_LETTER, -record.num_finished)
        return counts

    def requeue(self, group_id: str) -> None:
        """Move a dead letter to the end of its stage, as if it was never delivered."""
        dead = self.dead.pop(group_id)
        record = dead.record
        self.uncount_dead(record).num_trajectories_live += record.num_finished
        self.move(
            record, GroupState.UNSCORED if dead.stage is Stage.UNSCORED else GroupState.SCORED
        )
        self.add_entry(record, dead.stage, dead.payload)

    def held_task(self, lease_id: str) -> Record | None:
        """Return the record whose task is leased under this id, or None if it no longer is."""
        name = parse_lease(lease_id)
        record = self.records.get(name.task_id) if name and name.kind is Kind.TASK else None
        is_leased = record is not None and record.state is GroupState.LEASED
        return record if record and is_leased and record.lease_id == lease_id else None

    def revive_task(self, lease_id: str) -> Record | None:
        """Lease an offered task again to its last holder, whose lease has expired.

        Return None if someone else took the task, or its holder gave it back.
        """
        name = parse_lease(lease_id)
        record = self.records.get(name.task_id) if name and name.kind is Kind.TASK else None
        if record is None or record.lease_id != lease_id:
            return None
        if record.state is not GroupState.OFFERED:
            return None
        self.pull_task(record)
        # The expiry counted as a failure, but the holder is still at work.
        for index in record.expired_members:
            record.assembly.members[index].num_failures -= 1
        record.expired_members = []
        record.attempt -= 1
        self.move(record, GroupState.LEASED)
        return record

    def held_group(self, lease_id: str) -> tuple[Record, Stage, StagedGroup] | None:
        """Return the group whose last lease has this id, even if it expired or left since."""
        name = parse_lease(lease_id)
        if name is None or name.kind is Kind.TASK or name.task_id not in self.records:
            return None
        record, stage = self.records[name.task_id], STAGE_OF_KIND[name.kind]
        entry = record.entries.get(stage)
        return (record, stage, entry) if entry and entry.lease_id == lease_id else None

    def ready_in_turn(self, stage: Stage, selection: pb.Selection) -> list[Record]:
        """Return the ready groups of a stage in the order in which they are to be leased."""
        oldest_first = [record for _, record in sorted(self.ready[stage].items())]
        if selection == pb.SELECTION_PRIORITY:
            return sorted(oldest_first, key=lambda record: -record.entries[stage].priority)
        if selection == pb.SELECTION_UNIFORM:
            return random_order(oldest_first, self.token)
        return oldest_first

    def fitting(self, entries: Sequence[StagedGroup]) -> Sequence[StagedGroup]:
        """Return the first entries that fit one answer; the first one is sent whatever its size."""
        room = self.limits.max_lease_bytes
        for index, entry in enumerate(entries):
            room -= len(entry.payload)
            if room < 0 and index:
                return entries[:index]
        return entries

    def hold(self, record: Record, stage: Stage, lease_s: float) -> None:
        """Extend a group's lease to `lease_s` from now, even if it expired and nobody took it."""
        entry = record.entries[stage]
        if self.ready[stage].pop(entry.order, None):
            # Its expiry counted as a failure, but the holder is still at work.
            entry.num_failures -= not entry.is_innocent
            if stage is not Stage.UNSCORED:
                self.move(record, GroupState.TRAINING)
        self.deadlines[entry.lease_id] = self.now + lease_s

    def reap(self, now: float) -> None:
        """End every lease whose deadline has passed."""
        self.now = now
        expired = sorted(
            (deadline, lease_id) for lease_id, deadline in self.deadlines.items() if deadline <= now
        )
        for _, lease_id in expired:
            if record := self.held_task(lease_id):
                # Who finished a member under the lease did not die of the task at once.
                failed = not record.has_progress
                record.expired_members = record.assembly.open_members if failed else []
                self.release(record, DropReason.LEASE_EXPIRED, failed=failed)
            elif held := self.held_group(lease_id):
                record, stage, entry = held
                self.redeliver(
                    record, stage, DropReason.LEASE_EXPIRED, failed=not entry.is_innocent
                )

    def is_stale(self, record: Record, max_staleness: int | None) -> bool:
        """Return whether the group's oldest sampled token lags too far behind the policy."""
        if self.policy is None:
            return False
        versions = [
            PolicyVersion(lineage=lineage, number=oldest)
            for lineage, (oldest, _) in record.versions.items()
        ]
        return is_stale(versions, current=self.policy, max_staleness=max_staleness)

    def are_announced(self, versions: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether the versions were announced; before the first announcement all count."""
        return self.policy is None or all(
            newest <= self.lineages.get(lineage, -1) for lineage, (_, newest) in versions.items()
        )


def random_order(records: Sequence[Record], token: int) -> list[Record]:
    """Return the records in an order that the newest lease's token decides, each as likely.

    No two draws share the token. Fisher and Yates' shuffle, as lease_groups.lua has it.
    """
    order = list(records)
    for i in range(len(order)):
        digest = hashlib.sha1(f"{token}/{i}".encode(), usedforsecurity=False).hexdigest()
        j = i + int(digest[:13], 16) % (len(order) - i)
        order[i], order[j] = order[j], order[i]
    return order


def _add(dropped: MutableMapping[str, int], reason: str, by: int) -> None:
    """Add to the count of a reason, and remove a count of 0."""
    dropped[reason] = dropped.get(reason, 0) + by
    if not dropped[reason]:
        del dropped[reason]
