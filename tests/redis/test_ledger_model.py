"""Any order of plays, deaths, failures and late answers: the members and the groups add up.

The machine knows what it appended. In memory and in Redis the same has to come out; the two are
also compared with each other, call by call (tests/redis/test_replay_twins.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits, QueueStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import ack, lease, return_
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append,
    append_member,
    assert_adds_up,
    lease_tasks,
    make_task,
    offer_tasks,
    stats_of,
)

CREDITS = 3
MAX_ATTEMPTS = 2
T = TypeVar("T")


@dataclass
class Played:
    """What the machine knows of one task."""

    size: int
    least: int
    purpose: Purpose
    finished: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> list[int]:
        """The members that are to be played."""
        gone = {m for m, number in self.failures.items() if number >= MAX_ATTEMPTS}
        return [m for m in range(self.size) if m not in self.finished and m not in gone]

    def fail(self, members: list[int]) -> None:
        """Note a failed attempt at these."""
        for member in members:
            self.failures[member] = self.failures.get(member, 0) + 1


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self, make_store: Callable[[QueueLimits, Clock], QueueStore]) -> None:
        super().__init__()
        self.clock = Clock()
        self.runner = asyncio.Runner()
        self.run = new_run()
        limits = QueueLimits(max_attempts=MAX_ATTEMPTS, max_deliveries=99, lease_s=60)
        self.store = make_store(limits, self.clock)
        self.tasks: dict[str, Played] = {}
        self.leases: dict[str, pb.TaskLease] = {}
        self.has_progress: set[str] = set()
        self.past: list[pb.TaskLease] = []
        self.closed: dict[str, int] = {}
        self.trained: set[str] = set()
        self.ask(announce(self.store, self.run, credits=CREDITS))

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    @rule(
        size=st.integers(1, 4),
        least=st.integers(0, 4),
        purpose=st.sampled_from((Purpose.TRAINING, Purpose.TRAINING, Purpose.EVALUATION)),
    )
    def offer(self, size: int, least: int, purpose: Purpose) -> None:
        name, least = f"t{len(self.tasks)}", min(least, size)
        self.tasks[name] = Played(size, least, purpose)
        task = make_task(name, num_trajectories=size, min_trajectories=least, purpose=purpose)
        self.ask(offer_tasks(self.store, self.run, [task, task]))

    @rule(num=st.integers(1, 3))
    def lease(self, num: int) -> None:
        for held in self.ask(lease_tasks(self.store, self.run, num)).leases:
            assert list(held.members) == self.tasks[held.task.task_id].open
            assert held.task.task_id not in {h.task.task_id for h in self.leases.values()}
            self.leases[held.lease_id] = held
            self.past.append(held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_repeated=st.booleans())
    def finish(self, data: st.DataObject, is_repeated: bool) -> None:
        held = data.draw(st.sampled_from(list(self.leases.values())))
        task = self.tasks[held.task.task_id]
        member = data.draw(st.sampled_from(task.open))
        for number in range(1 + is_repeated):
            outcome = self.ask(append_member(self.store, self.run, held.lease_id, member))
            expected = pb.APPEND_STATUS_DUPLICATE if number else pb.APPEND_STATUS_APPENDED
            assert outcome.status == expected
        task.finished.add(member)
        self.has_progress.add(held.lease_id)
        self._forget_ended()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_at_fault=st.booleans(), num_played=st.integers(0, 2))
    def give_back(self, data: st.DataObject, is_at_fault: bool, num_played: int) -> None:
        held = data.draw(st.sampled_from(list(self.leases.values())))
        task = self.tasks[held.task.task_id]
        members = data.draw(st.lists(st.sampled_from(task.open), unique=True))
        if is_at_fault:
            task.fail(members or task.open)
        answer = self.ask(
            return_(
                self.store,
                self.run,
                held.lease_id,
                failed=is_at_fault,
                played=num_played,
                members=members if is_at_fault else (),
            )
        )
        assert answer == (1, int(not task.open and not self._is_used(task)))
        del self.leases[held.lease_id]

    @rule()
    def die(self) -> None:
        """All collectors are killed, and their leases run out."""
        self.clock.pass_s(61)
        for held in self.leases.values():
            task = self.tasks[held.task.task_id]
            if held.lease_id not in self.has_progress:
                task.fail(task.open)
        self.leases.clear()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def append_late(self, data: st.DataObject) -> None:
        """A collector that was taken for dead appends what it had finished."""
        held = data.draw(st.sampled_from(self.past))
        task = self.tasks[held.task.task_id]
        member = data.draw(st.sampled_from(list(held.members)))
        was_open = member in task.open
        outcome = self.ask(append_member(self.store, self.run, held.lease_id, member))
        if outcome.status == pb.APPEND_STATUS_APPENDED:
            assert member not in task.finished
            task.finished.add(member)
            self.has_progress |= {held.lease_id}
        elif outcome.status == pb.APPEND_STATUS_DUPLICATE:
            assert member in task.finished
        else:
            assert outcome.reason == "LEASE_LOST"
            assert held.lease_id not in self.leases or not was_open
        self._forget_ended()

    @rule(stage=st.sampled_from((Stage.UNSCORED, Stage.EVALUATION)))
    def read(self, stage: Stage) -> None:
        """Every group that comes out was closed by the rule, once, with all that was finished."""
        for held in self.ask(lease(self.store, self.run, stage, num=9)).leases:
            task, name = self.tasks[held.group.group_id], held.group.group_id
            numbers = [t.trajectory_id for t in held.group.trajectories]
            assert numbers == [f"{name}.{member}" for member in sorted(task.finished)]
            assert not task.open
            assert self._is_used(task)
            assert name not in self.closed
            self.closed[name] = len(numbers)
            self.ask(self._drop(held.lease_id))

    @rule()
    def train(self) -> None:
        """Groups that are scored come out once more, and are consumed."""
        for held in self.ask(lease(self.store, self.run, Stage.UNSCORED, num=9)).leases:
            item = pb.AppendItem(group=held.group, lease_id=held.lease_id)
            (outcome,) = self.ask(append(self.store, self.run, Stage.SCORED, item))
            assert outcome.status == pb.APPEND_STATUS_APPENDED
            assert self.ask(ack(self.store, self.run, held.lease_id)) == ""
        for held in self.ask(lease(self.store, self.run, Stage.SCORED, num=9)).leases:
            name = held.group.group_id
            assert name not in self.closed
            assert len(held.group.trajectories) == len(self.tasks[name].finished)
            assert self.ask(ack(self.store, self.run, held.lease_id)) == ""
            self.closed[name] = len(held.group.trajectories)
            self.trained.add(name)

    @invariant()
    def adds_up(self) -> None:
        stats = self.ask(stats_of(self.store, self.run))
        assert_adds_up(stats, size=None)
        for purpose, counts in (
            (Purpose.TRAINING, stats.training),
            (Purpose.EVALUATION, stats.evaluation),
        ):
            tasks = [task for task in self.tasks.values() if task.purpose is purpose]
            waiting = sum(len(task.finished) for task in tasks if task.open)
            assert counts.num_trajectories_waiting == waiting
            short = sum(not t.open and self._is_used(t) and len(t.finished) < t.size for t in tasks)
            assert counts.num_groups_closed_short == short
            dropped = sum(not task.open and not self._is_used(task) for task in tasks)
            assert sum(counts.num_groups_dropped.values()) == dropped + (
                sum(
                    self.tasks[name].purpose is purpose
                    for name in self.closed.keys() - self.trained
                )
            )
            consumed = {name for name in self.trained if self.tasks[name].purpose is purpose}
            assert counts.num_groups_consumed == len(consumed)

    def teardown(self) -> None:
        """Whatever happened: the rest can be played, and then no task is open."""
        self.die()
        self.read(Stage.UNSCORED)  # which frees the credits
        while leases := self.ask(lease_tasks(self.store, self.run, 9)).leases:
            for held in leases:
                for member in held.members:
                    self.ask(append_member(self.store, self.run, held.lease_id, member))
                    self.tasks[held.task.task_id].finished.add(member)
            self.read(Stage.UNSCORED)
            self.read(Stage.EVALUATION)
        stats = self.ask(stats_of(self.store, self.run))
        assert_adds_up(stats, size=None)
        for counts in (stats.training, stats.evaluation):
            assert counts.num_tasks_offered == counts.num_groups_leased == 0
            assert counts.num_trajectories_waiting == 0
        self.ask(self.store.close())
        self.runner.close()

    def _forget_ended(self) -> None:
        """The lease of a group that closed has ended."""
        over = [key for key, held in self.leases.items() if not self.tasks[held.task.task_id].open]
        for lease_id in over:
            del self.leases[lease_id]

    @staticmethod
    def _is_used(task: Played) -> bool:
        """Whether a group without open members is used, and not dropped."""
        return len(task.finished) == task.size or 0 < task.least <= len(task.finished)

    async def _drop(self, lease_id: str) -> None:
        """End the group's way here: dropped, which every stage allows."""
        item = pb.AcknowledgeItem(lease_id=lease_id, outcome=pb.OUTCOME_DROPPED, reason="read")
        request = pb.AcknowledgeRequest(run=self.run, items=[item])
        await self.store.apply(request, pb.AcknowledgeResponse)


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=pytest.mark.redis)])
def test_queue_and_ledger_are_as_the_model_says(kind: str, request: pytest.FixtureRequest) -> None:
    def make_store(limits: QueueLimits, clock: Clock) -> QueueStore:
        if kind == "memory":
            return ModelStore(limits, clock=clock)
        return RedisStore(request.getfixturevalue("redis_url"), limits, clock=clock)

    few = settings(max_examples=50, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(lambda: LedgerMachine(make_store), settings=few)
