"""One run's ledger in memory: its records and the transitions between their states.

`redis_store` does the same in Lua (`scripts/ledger.lua`), function for function.
"""

from __future__ import annotations

import heapq
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum

from dialoop.reasons import DropReason
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1.replay_service_pb2 import LedgerCounts

from dialoop_services.replay.leases import Kind, format_lease, parse_lease
from dialoop_services.replay.store import GroupFacts, QueueLimits
from dialoop_services.rl.staleness import is_stale

KIND_OF_STAGE = {
    Stage.UNSCORED: Kind.UNSCORED,
    Stage.SCORED: Kind.SCORED,
    Stage.EVALUATION: Kind.EVALUATION,
}
STAGE_OF_KIND = {kind: stage for stage, kind in KIND_OF_STAGE.items()}


class GroupState(StrEnum):
    """Where a task and its group stand; the value is the field of LedgerCounts that counts it."""

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
    """A group in one stage. After it left, `lease_id` still knows who finished it."""

    order: int
    payload: bytes
    lease_id: str = ""
    worker: str = ""
    num_deliveries: int = 0
    num_failures: int = 0
    # Under the present lease its work was done once: nothing about it can have stopped its holder.
    is_innocent: bool = False
    is_present: bool = True


@dataclass(slots=True, kw_only=True)
class Record:
    """A task and the one group that was accepted for it; `payload` is the serialised task."""

    task_id: str
    purpose: Purpose
    num_trajectories: int
    payload: bytes
    order: int
    state: GroupState = GroupState.OFFERED
    attempt: int = 1
    num_failures: int = 0
    lease_id: str = ""
    group: GroupFacts | None = None
    is_scored: bool = False
    entries: dict[Stage, StagedGroup] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class BuriedGroup:
    """A dead letter: why it is one, and after how many deliveries."""

    record: Record
    stage: Stage
    reason: str
    num_deliveries: int
    payload: bytes


@dataclass(slots=True, kw_only=True)
class Ledger:
    """All of a run's state; each method is one transition. `now` is the clock's at this request."""

    limits: QueueLimits
    token: int
    now: float = 0.0
    order: int = 0
    cursor: str = ""
    records: dict[str, Record] = field(default_factory=dict)
    offered: dict[Purpose, list[tuple[int, str]]] = field(
        default_factory=lambda: {purpose: [] for purpose in Purpose}
    )
    ready: dict[Stage, dict[int, Record]] = field(
        default_factory=lambda: {stage: {} for stage in Stage}
    )
    deadlines: dict[str, float] = field(default_factory=dict)
    dead: dict[str, BuriedGroup] = field(default_factory=dict)
    policy: PolicyVersion | None = None
    lineages: dict[str, int] = field(default_factory=dict)
    max_outstanding: int = 0
    counts: dict[Purpose, LedgerCounts] = field(
        default_factory=lambda: {purpose: LedgerCounts() for purpose in Purpose}
    )
    num_redelivered: int = 0
    num_duplicates: int = 0
    num_rejected: int = 0

    @property
    def credits(self) -> int:
        """Training groups that may still be started."""
        counts = self.counts[Purpose.TRAINING]
        num_outstanding: int = sum(getattr(counts, state) for state in _OUTSTANDING)
        return max(0, self.max_outstanding - num_outstanding)

    def counts_of(self, record: Record) -> LedgerCounts:
        """The counts the record belongs to."""
        return self.counts[record.purpose]

    def next_order(self) -> int:
        """A number that grows with every entry."""
        self.order += 1
        return self.order

    def new_lease(self, kind: Kind, task_id: str, lease_s: float) -> str:
        """A fresh lease that runs for `lease_s`."""
        self.token += 1
        lease_id = format_lease(kind, self.token, task_id)
        self.deadlines[lease_id] = self.now + lease_s
        return lease_id

    def count(self, record: Record, state: GroupState, by: int) -> None:
        """Change how many groups stand in a state; drops are counted by reason."""
        counts = self.counts_of(record)
        if state is not GroupState.DROPPED:
            setattr(counts, state, getattr(counts, state) + by)

    def move(self, record: Record, state: GroupState) -> None:
        """Change the state and the counts with it."""
        self.count(record, record.state, -1)
        self.count(record, state, 1)
        record.state = state

    def push_task(self, record: Record) -> None:
        """Make the task leasable, at its old place in line."""
        heapq.heappush(self.offered[record.purpose], (record.order, record.task_id))

    def drop(self, record: Record, reason: str) -> None:
        """The final drop: counted under its reason, the credit free."""
        self.move(record, GroupState.DROPPED)
        counts = self.counts_of(record)
        _add(counts.num_groups_dropped, reason, 1)
        if record.group is not None:
            counts.num_trajectories_live -= record.num_trajectories
            _add(counts.num_trajectories_dropped, reason, record.num_trajectories)

    def count_played(self, record: Record, num_discarded: int) -> None:
        """The group's trajectories are live; those of members played again are dropped."""
        counts = self.counts_of(record)
        counts.num_trajectories_generated += record.num_trajectories + num_discarded
        counts.num_trajectories_live += record.num_trajectories
        _add(counts.num_trajectories_dropped, DropReason.MEMBER_RETRIED, num_discarded)

    def count_thrown_away(self, record: Record, num_trajectories: int, reason: str) -> None:
        """Trajectories that were played under a task lease for nothing."""
        counts = self.counts_of(record)
        counts.num_trajectories_generated += num_trajectories
        _add(counts.num_trajectories_dropped, reason, num_trajectories)

    def consume(self, record: Record) -> None:
        """The group is in a checkpoint."""
        self.move(record, GroupState.CONSUMED)
        self.counts_of(record).num_trajectories_live -= record.num_trajectories
        self.counts_of(record).num_trajectories_consumed += record.num_trajectories

    def reissue(self, record: Record, reason: str, *, failed: bool) -> bool:
        """Take the task's lease away; True if the task is given up for `reason`."""
        self.deadlines.pop(record.lease_id, None)
        record.lease_id = ""
        record.num_failures += failed
        if record.num_failures >= self.limits.max_attempts:
            self.drop(record, reason)
            record.payload = b""
            return True
        record.attempt += 1
        self.move(record, GroupState.OFFERED)
        self.push_task(record)
        return False

    def add_entry(self, record: Record, stage: Stage, payload: bytes) -> None:
        """Put the group at the end of a stage."""
        entry = StagedGroup(order=self.next_order(), payload=payload)
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
        """Make a leased group leasable again; True if it became a dead letter instead."""
        entry = record.entries[stage]
        self.deadlines.pop(entry.lease_id, None)
        if stage is Stage.UNSCORED and record.is_scored:
            # The scored copy stands: nothing is left to do here.
            self.remove_entry(record, stage)
            return False
        entry.num_failures += failed
        if set_aside or entry.num_failures >= self.limits.max_deliveries:
            self.bury(record, stage, reason)
            return True
        if record.state in (GroupState.TRAINING, GroupState.TRAINED):
            self.move(record, GroupState.SCORED)
        self.ready[stage][entry.order] = record
        return False

    def bury(self, record: Record, stage: Stage, reason: str) -> None:
        """Set the group aside as a dead letter."""
        assert record.group is not None
        entry = record.entries[stage]
        self.dead[record.group.group_id] = BuriedGroup(
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
        """Let go of a dead letter's group; it stays dropped, now for this reason."""
        record = self.dead.pop(group_id).record
        counts = self.uncount_dead(record)
        _add(counts.num_groups_dropped, DropReason.DEAD_LETTER_FORGOTTEN, 1)
        _add(
            counts.num_trajectories_dropped,
            DropReason.DEAD_LETTER_FORGOTTEN,
            record.num_trajectories,
        )

    def uncount_dead(self, record: Record) -> LedgerCounts:
        """The record's counts, where it is no dead letter any more."""
        counts = self.counts_of(record)
        _add(counts.num_groups_dropped, DropReason.DEAD_LETTER, -1)
        _add(counts.num_trajectories_dropped, DropReason.DEAD_LETTER, -record.num_trajectories)
        return counts

    def exhume(self, group_id: str) -> None:
        """Put a dead letter back at the end of its stage, as if never delivered."""
        dead = self.dead.pop(group_id)
        record = dead.record
        self.uncount_dead(record).num_trajectories_live += record.num_trajectories
        self.move(
            record, GroupState.UNSCORED if dead.stage is Stage.UNSCORED else GroupState.SCORED
        )
        self.add_entry(record, dead.stage, dead.payload)

    def held_task(self, lease_id: str) -> Record | None:
        """The record whose task is leased under this id, if it still is."""
        name = parse_lease(lease_id)
        record = self.records.get(name.task_id) if name and name.kind is Kind.TASK else None
        return record if record and record.lease_id == lease_id else None

    def held_group(self, lease_id: str) -> tuple[Record, Stage, StagedGroup] | None:
        """The entry this lease was the last to hold, even if it expired or left since."""
        name = parse_lease(lease_id)
        if name is None or name.kind is Kind.TASK or name.task_id not in self.records:
            return None
        record, stage = self.records[name.task_id], STAGE_OF_KIND[name.kind]
        entry = record.entries.get(stage)
        return (record, stage, entry) if entry and entry.lease_id == lease_id else None

    def hold(self, record: Record, stage: Stage, lease_s: float) -> None:
        """Let the holder keep the group for `lease_s`, also if it expired but nobody took it."""
        entry = record.entries[stage]
        if self.ready[stage].pop(entry.order, None):
            # It had run out, which counted as a failure; but here is its holder.
            entry.num_failures -= not entry.is_innocent
            if stage is not Stage.UNSCORED:
                self.move(record, GroupState.TRAINING)
        self.deadlines[entry.lease_id] = self.now + lease_s

    def reap(self, now: float) -> None:
        """Take back every lease whose deadline has passed."""
        self.now = now
        expired = sorted(
            (deadline, lease_id) for lease_id, deadline in self.deadlines.items() if deadline <= now
        )
        for _, lease_id in expired:
            if record := self.held_task(lease_id):
                self.reissue(record, DropReason.LEASE_EXPIRED, failed=True)
            elif held := self.held_group(lease_id):
                record, stage, entry = held
                self.redeliver(
                    record, stage, DropReason.LEASE_EXPIRED, failed=not entry.is_innocent
                )

    def is_stale(self, record: Record, max_staleness: int | None) -> bool:
        """Whether the group's oldest sampled token lags too far behind the policy."""
        if self.policy is None or record.group is None:
            return False
        versions = [
            PolicyVersion(lineage=lineage, number=oldest)
            for lineage, (oldest, _) in record.group.versions.items()
        ]
        return is_stale(versions, current=self.policy, max_staleness=max_staleness)

    def are_known(self, group: GroupFacts) -> bool:
        """Whether its versions were announced; everything is before the first announcement."""
        return self.policy is None or all(
            newest <= self.lineages.get(lineage, -1)
            for lineage, (_, newest) in group.versions.items()
        )


def _add(dropped: MutableMapping[str, int], reason: str, by: int) -> None:
    """Count under a reason; what comes to 0 is not listed."""
    dropped[reason] = dropped.get(reason, 0) + by
    if not dropped[reason]:
        del dropped[reason]
