"""The queue in memory: the readable twin of `redis_store`, gone when the process ends."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage

from dialoop_services.replay.leases import Kind
from dialoop_services.replay.memory_store.moves import (
    DUPLICATE,
    acknowledge,
    append_played,
    append_scored,
    give_back,
    lease_group,
    reopen,
)
from dialoop_services.replay.memory_store.run import Record, Run, Tally
from dialoop_services.replay.refusals import (
    batch_too_large,
    cursor_moved,
    group_not_found,
    version_not_newer,
)
from dialoop_services.replay.store import (
    STALE,
    Acknowledgement,
    Appended,
    Counts,
    CursorMove,
    DeadLetter,
    EmptyReason,
    GivenBack,
    GroupLeases,
    GroupQuery,
    Limits,
    NewGroup,
    Offered,
    OfferedTask,
    Reopened,
    Returned,
    State,
    Stats,
    TaskLease,
    TaskLeases,
)


class MemoryStore:
    """A Store in plain dicts. No method awaits, so each is atomic on one event loop."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._runs: dict[str, Run] = {}

    def _run(self, name: str) -> Run:
        now = self._clock()
        if name not in self._runs:
            # Tokens begin at the clock so that leases of a purged run stay lost.
            self._runs[name] = Run(limits=self._limits, token=int(now * 1_000_000))
        run = self._runs[name]
        run.reap(now)
        return run

    async def offer_tasks(
        self, run: str, tasks: Sequence[OfferedTask], cursor: CursorMove | None
    ) -> Offered:
        """See `Store`."""
        state = self._run(run)
        if cursor is not None:
            if cursor.expected != state.cursor:
                raise cursor_moved(state.cursor)
            state.cursor = cursor.next
        num_new = 0
        for task in tasks:
            if task.task_id in state.records:
                continue
            record = Record(task=task, order=state.next_order())
            state.records[task.task_id] = record
            state.tally(record).groups[State.OFFERED] += 1
            state.push_task(record)
            num_new += 1
        return Offered(num_new=num_new, num_known=len(tasks) - num_new, cursor=state.cursor)

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float
    ) -> TaskLeases:
        """See `Store`."""
        state = self._run(run)
        leases: list[TaskLease] = []
        budget = {Purpose.EVALUATION: max_tasks, Purpose.TRAINING: state.credits}
        for purpose, allowed in budget.items():
            waiting = state.offered[purpose]
            num_wanted = min(allowed, max_tasks - len(leases), len(waiting))
            for _ in range(num_wanted):
                record = state.records[heapq.heappop(waiting)[1]]
                state.move(record, State.LEASED)
                record.lease_id = state.new_lease(
                    Kind.TASK, record.task.task_id, self._clock() + lease_s
                )
                leases.append(
                    TaskLease(
                        lease_id=record.lease_id,
                        attempt=record.attempt,
                        payload=record.task.payload,
                    )
                )
        reason = EmptyReason.NOT_EMPTY if leases else _why_no_tasks(state)
        return TaskLeases(
            leases=tuple(leases), empty_reason=reason, credits=state.credits, cursor=state.cursor
        )

    async def append_groups(
        self, run: str, stage: Stage, groups: Sequence[NewGroup]
    ) -> tuple[Appended, ...]:
        """See `Store`."""
        state = self._run(run)
        add = append_scored if stage is Stage.SCORED else append_played
        results = tuple(add(state, stage, group) for group in groups)
        state.num_duplicates += results.count(DUPLICATE)
        state.num_rejected += sum(bool(result.reason) for result in results)
        return results

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """See `Store`."""
        self._run(run).num_rejected += num_groups

    async def lease_groups(self, run: str, query: GroupQuery) -> GroupLeases:
        """See `Store`."""
        state, stage = self._run(run), query.stage
        ready, chosen, room = state.ready[stage], list[Record](), query.max_bytes
        for order in sorted(ready):
            record = ready[order]
            if len(chosen) == query.max_groups:
                break
            if not record.task.task_id.startswith(query.task_id_prefix):
                continue
            if stage is Stage.SCORED and state.is_stale(record, query.max_staleness):
                state.remove_entry(record, stage)
                record.entries[stage].lease_id = ""
                state.drop(record, STALE)
                continue
            room -= len(record.entries[stage].payload)
            if room < 0 and chosen:
                break
            chosen.append(record)
        if len(chosen) < max(1, query.min_groups):
            if room < 0:
                raise batch_too_large()
            reason = EmptyReason.TOO_FEW if chosen else EmptyReason.NO_GROUPS
            return GroupLeases(leases=(), empty_reason=reason, num_ready=len(ready))
        deadline = self._clock() + query.lease_s
        leases = tuple(
            lease_group(state, record, stage, worker=query.worker, deadline=deadline)
            for record in chosen
        )
        return GroupLeases(leases=leases, empty_reason=EmptyReason.NOT_EMPTY, num_ready=len(ready))

    async def acknowledge(self, run: str, items: Sequence[Acknowledgement]) -> tuple[str, ...]:
        """See `Store`."""
        state = self._run(run)
        return tuple(acknowledge(state, item) for item in items)

    async def give_back(self, run: str, items: Sequence[GivenBack]) -> Returned:
        """See `Store`."""
        state = self._run(run)
        num_returned = num_dropped = 0
        for item in items:
            returned, dropped = give_back(state, item)
            num_returned += returned
            num_dropped += dropped
        return Returned(num_returned=num_returned, num_dropped=num_dropped)

    async def extend(self, run: str, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """See `Store`."""
        state, deadline = self._run(run), self._clock() + lease_s
        lost: list[str] = []
        for lease_id in lease_ids:
            if state.held_task(lease_id):
                state.deadlines[lease_id] = deadline
            elif (held := state.held_group(lease_id)) and held[2].is_present:
                state.hold(held[0], held[1], deadline)
            else:
                lost.append(lease_id)
        return tuple(lost)

    async def leases_of(self, run: str, stage: Stage, worker: str) -> tuple[str, ...]:
        """See `Store`."""
        return self._run(run).leases_of(stage, worker)

    async def reopen(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float, max_bytes: int = 1 << 40
    ) -> Reopened:
        """See `Store`."""
        return reopen(self._run(run), lease_ids, self._clock() + lease_s, max_bytes)

    async def advance_policy(
        self,
        run: str,
        version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str],
        max_outstanding_groups: int,
    ) -> int:
        """See `Store`."""
        state = self._run(run)
        if version != state.policy and version.lineage in state.lineages:
            current = state.policy
            if current is None or version.lineage != current.lineage or version < current:
                raise version_not_newer(version, current)
        state.policy = version
        state.lineages[version.lineage] = version.number
        state.max_outstanding = max_outstanding_groups
        for lease_id in trained_lease_ids:
            held = state.held_group(lease_id)
            if held is None or held[1] is not Stage.SCORED or not held[2].is_present:
                continue
            record, stage, entry = held
            if entry.order in state.ready[stage]:
                state.hold(record, stage, self._clock() + self._limits.lease_s)
            if record.state is State.TRAINING:
                state.move(record, State.TRAINED)
            entry.is_innocent = True
        return state.credits

    async def stats(self, run: str) -> Stats:
        """See `Store`."""
        state = self._run(run)
        return Stats(
            training=_counts(state.tallies[Purpose.TRAINING]),
            evaluation=_counts(state.tallies[Purpose.EVALUATION]),
            policy_version=state.policy,
            max_outstanding_groups=state.max_outstanding,
            credits=state.credits,
            num_redelivered=state.num_redelivered,
            num_dead_letters=len(state.dead),
            num_duplicate_appends=state.num_duplicates,
            num_rejected_appends=state.num_rejected,
            cursor=state.cursor,
            store="memory (not durable)",
        )

    async def peek(self, run: str, stage: Stage, max_groups: int) -> tuple[bytes, ...]:
        """See `Store`."""
        ready = self._run(run).ready[stage]
        return tuple(ready[order].entries[stage].payload for order in sorted(ready)[:max_groups])

    async def dead_letters(self, run: str, max_groups: int) -> tuple[DeadLetter, ...]:
        """See `Store`."""
        return tuple(
            DeadLetter(
                group_id=group_id,
                stage=dead.stage,
                reason=dead.reason,
                num_deliveries=dead.entry.num_deliveries,
                payload=dead.entry.payload,
            )
            for group_id, dead in list(self._run(run).dead.items())[:max_groups]
        )

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """See `Store`."""
        state, wanted = self._run(run), tuple(dict.fromkeys(group_ids))
        for group_id in wanted:
            if group_id not in state.dead:
                raise group_not_found(group_id)
        for group_id in wanted:
            state.exhume(group_id)
        return len(wanted)

    async def purge(self, run: str) -> None:
        """See `Store`."""
        self._runs.pop(run, None)

    async def check(self) -> None:
        """Memory is always there."""

    async def close(self) -> None:
        """Nothing to let go of."""


def _why_no_tasks(state: Run) -> EmptyReason:
    if not state.offered[Purpose.TRAINING]:
        return EmptyReason.NO_TASKS
    return EmptyReason.NO_POLICY if state.policy is None else EmptyReason.NO_CREDITS


def _counts(tally: Tally) -> Counts:
    return Counts(
        groups={state: tally.groups[state] for state in State},
        groups_dropped={reason: n for reason, n in tally.groups_dropped.items() if n},
        num_trajectories_generated=tally.generated,
        num_trajectories_consumed=tally.consumed,
        num_trajectories_live=tally.live,
        trajectories_dropped={reason: n for reason, n in tally.dropped.items() if n},
    )
