"""One run's ledger in memory: its records and the transitions between their states.

`redis_store` does the same in Lua (`scripts/ledger.lua`), function for function.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage

from dialoop_services.replay.leases import Kind, format_lease, parse_lease
from dialoop_services.replay.store import (
    DEAD_LETTER,
    DEAD_LETTER_FORGOTTEN,
    FINAL,
    LEASE_EXPIRED,
    MEMBER_RETRIED,
    OUTSTANDING,
    Limits,
    OfferedTask,
    State,
    VersionSpan,
)
from dialoop_services.rl.staleness import free_credits, is_stale

KIND_OF_STAGE = {
    Stage.UNSCORED: Kind.UNSCORED,
    Stage.SCORED: Kind.SCORED,
    Stage.EVALUATION: Kind.EVALUATION,
}
STAGE_OF_KIND = {kind: stage for stage, kind in KIND_OF_STAGE.items()}


@dataclass(slots=True, kw_only=True)
class Entry:
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
    """A task and the one group that was accepted for it."""

    task: OfferedTask
    order: int
    state: State = State.OFFERED
    attempt: int = 1
    num_failures: int = 0
    lease_id: str = ""
    group_id: str = ""
    digest: str = ""
    versions: tuple[VersionSpan, ...] = ()
    is_scored: bool = False
    entries: dict[Stage, Entry] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Dead:
    """A dead letter."""

    record: Record
    stage: Stage
    entry: Entry
    reason: str


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one purpose."""

    groups: Counter[State] = field(default_factory=Counter)
    groups_dropped: Counter[str] = field(default_factory=Counter)
    generated: int = 0
    consumed: int = 0
    live: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class Run:
    """All of a run's state; each method is one transition."""

    limits: Limits
    token: int
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
    dead: dict[str, Dead] = field(default_factory=dict)
    policy: PolicyVersion | None = None
    lineages: dict[str, int] = field(default_factory=dict)
    max_outstanding: int = 0
    tallies: dict[Purpose, Tally] = field(
        default_factory=lambda: {purpose: Tally() for purpose in Purpose}
    )
    num_redelivered: int = 0
    num_duplicates: int = 0
    num_rejected: int = 0

    @property
    def credits(self) -> int:
        """Training groups that may still be started."""
        groups = self.tallies[Purpose.TRAINING].groups
        num_outstanding = sum(groups[state] for state in OUTSTANDING)
        return free_credits(max_outstanding=self.max_outstanding, num_outstanding=num_outstanding)

    def tally(self, record: Record) -> Tally:
        """The counts the record belongs to."""
        return self.tallies[record.task.purpose]

    def next_order(self) -> int:
        """A number that grows with every entry."""
        self.order += 1
        return self.order

    def new_lease(self, kind: Kind, task_id: str, deadline: float) -> str:
        """A fresh lease that runs until `deadline`."""
        self.token += 1
        lease_id = format_lease(kind, self.token, task_id)
        self.deadlines[lease_id] = deadline
        return lease_id

    def move(self, record: Record, state: State) -> None:
        """Change the state and the counts with it."""
        groups = self.tally(record).groups
        groups[record.state] -= 1
        groups[state] += 1
        record.state = state

    def push_task(self, record: Record) -> None:
        """Make the task leasable, at its old place in line."""
        heapq.heappush(self.offered[record.task.purpose], (record.order, record.task.task_id))

    def drop(self, record: Record, reason: str) -> None:
        """The final drop: counted under its reason, the credit free."""
        self.move(record, State.DROPPED)
        self.tally(record).groups_dropped[reason] += 1
        if record.group_id:
            self.tally(record).live -= record.task.num_trajectories
            self.tally(record).dropped[reason] += record.task.num_trajectories

    def count_played(self, record: Record, num_discarded: int) -> None:
        """The group's trajectories are live; those of members played again are dropped."""
        tally, num_trajectories = self.tally(record), record.task.num_trajectories
        tally.generated += num_trajectories + num_discarded
        tally.live += num_trajectories
        tally.dropped[MEMBER_RETRIED] += num_discarded

    def consume(self, record: Record) -> None:
        """The group is in a checkpoint."""
        self.move(record, State.CONSUMED)
        self.tally(record).live -= record.task.num_trajectories
        self.tally(record).consumed += record.task.num_trajectories
        self.forget_task(record)

    def forget_task(self, record: Record) -> None:
        """Keep of a task only what makes later calls idempotent."""
        record.task = replace(record.task, payload=b"")

    def reissue(self, record: Record, reason: str, *, failed: bool) -> bool:
        """Take the task's lease away; True if the task is given up for `reason`."""
        self.deadlines.pop(record.lease_id, None)
        record.lease_id = ""
        record.num_failures += failed
        if record.num_failures >= self.limits.max_attempts:
            self.drop(record, reason)
            self.forget_task(record)
            return True
        record.attempt += 1
        self.move(record, State.OFFERED)
        self.push_task(record)
        return False

    def add_entry(self, record: Record, stage: Stage, payload: bytes) -> None:
        """Put the group at the end of a stage."""
        entry = Entry(order=self.next_order(), payload=payload)
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
        if record.state in (State.TRAINING, State.TRAINED):
            self.move(record, State.SCORED)
        self.ready[stage][entry.order] = record
        return False

    def bury(self, record: Record, stage: Stage, reason: str) -> None:
        """Set the group aside as a dead letter."""
        entry = record.entries[stage]
        kept = Entry(order=entry.order, payload=entry.payload, num_deliveries=entry.num_deliveries)
        self.dead[record.group_id] = Dead(record=record, stage=stage, entry=kept, reason=reason)
        self.remove_entry(record, stage)
        entry.lease_id = ""
        self.drop(record, DEAD_LETTER)
        while len(self.dead) > self.limits.max_dead_letters:
            self.forget_letter(next(iter(self.dead)))

    def forget_letter(self, group_id: str) -> None:
        """Let go of a dead letter's group; it stays dropped, now for this reason."""
        record = self.dead.pop(group_id).record
        tally, num_trajectories = self.uncount_dead(record), record.task.num_trajectories
        tally.groups_dropped[DEAD_LETTER_FORGOTTEN] += 1
        tally.dropped[DEAD_LETTER_FORGOTTEN] += num_trajectories

    def uncount_dead(self, record: Record) -> Tally:
        """The record's counts, where it is no dead letter any more."""
        tally = self.tally(record)
        tally.groups_dropped[DEAD_LETTER] -= 1
        tally.dropped[DEAD_LETTER] -= record.task.num_trajectories
        return tally

    def exhume(self, group_id: str) -> None:
        """Put a dead letter back at the end of its stage, as if never delivered."""
        dead = self.dead.pop(group_id)
        record = dead.record
        self.uncount_dead(record).live += record.task.num_trajectories
        self.move(record, State.UNSCORED if dead.stage is Stage.UNSCORED else State.SCORED)
        self.add_entry(record, dead.stage, dead.entry.payload)

    def held_task(self, lease_id: str) -> Record | None:
        """The record whose task is leased under this id, if it still is."""
        name = parse_lease(lease_id)
        record = self.records.get(name.task_id) if name and name.kind is Kind.TASK else None
        return record if record and record.lease_id == lease_id else None

    def held_group(self, lease_id: str) -> tuple[Record, Stage, Entry] | None:
        """The entry this lease was the last to hold, even if it expired or left since."""
        name = parse_lease(lease_id)
        if name is None or name.kind is Kind.TASK or name.task_id not in self.records:
            return None
        record, stage = self.records[name.task_id], STAGE_OF_KIND[name.kind]
        entry = record.entries.get(stage)
        return (record, stage, entry) if entry and entry.lease_id == lease_id else None

    def leases_of(self, stage: Stage, worker: str) -> tuple[str, ...]:
        """What a worker holds in a stage, oldest group first."""
        held = (self.held_group(lease_id) for lease_id in self.deadlines)
        entries = [found[2] for found in held if found and found[1] is stage]
        own = sorted((e.order, e.lease_id) for e in entries if e.worker == worker)
        return tuple(lease_id for _, lease_id in own)

    def hold(self, record: Record, stage: Stage, deadline: float) -> None:
        """Let the holder keep the group until `deadline`, also if it expired but nobody took it."""
        entry = record.entries[stage]
        if self.ready[stage].pop(entry.order, None):
            # It had run out, which counted as a failure; but here is its holder.
            entry.num_failures -= not entry.is_innocent
            if stage is not Stage.UNSCORED:
                self.move(record, State.TRAINING)
        self.deadlines[entry.lease_id] = deadline

    def reap(self, now: float) -> None:
        """Take back every lease whose deadline has passed."""
        expired = sorted(
            (deadline, lease_id) for lease_id, deadline in self.deadlines.items() if deadline <= now
        )
        for _, lease_id in expired:
            if record := self.held_task(lease_id):
                self.reissue(record, LEASE_EXPIRED, failed=True)
            elif held := self.held_group(lease_id):
                record, stage, entry = held
                self.redeliver(record, stage, LEASE_EXPIRED, failed=not entry.is_innocent)

    def is_stale(self, record: Record, max_staleness: int | None) -> bool:
        """Whether the group's oldest sampled token lags too far behind the policy."""
        if self.policy is None:
            return False
        oldest = [
            PolicyVersion(lineage=span.lineage, number=span.oldest) for span in record.versions
        ]
        return is_stale(oldest, current=self.policy, max_staleness=max_staleness)

    def is_known(self, span: VersionSpan) -> bool:
        """Whether the versions were announced; everything is before the first announcement."""
        return self.policy is None or span.newest <= self.lineages.get(span.lineage, -1)

    def is_final(self, record: Record) -> bool:
        """Whether nothing can happen to the group any more."""
        return record.state in FINAL
