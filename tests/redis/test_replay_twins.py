"""Random schedules on Redis and on its twin in memory: every answer and every count is the same."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from dialoop.errors import DialoopError
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop_services.replay.memory_store.store import MemoryStore
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import (
    DEAD_LETTER,
    DEAD_LETTER_FORGOTTEN,
    Acknowledgement,
    CursorMove,
    GivenBack,
    GroupQuery,
    Limits,
    NewGroup,
    Outcome,
    State,
    Store,
    VersionSpan,
)

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.samples.replay_samples import Clock, assert_adds_up, bare_group, bare_task

pytestmark = pytest.mark.redis

NUM_MOVES = 500
Move = Callable[[Store], Awaitable[object]]


class Schedule:
    """Draws moves that are mostly sensible, from what the stores answered so far."""

    def __init__(self, seed: int, run: str) -> None:
        self.random = random.Random(seed)
        self.run = run
        self.num_tasks = 0
        self.policy = PolicyVersion(lineage="l0", number=0)
        self.tasks: list[tuple[str, str, int]] = []
        self.leases: list[str] = []
        self.groups: list[NewGroup] = []

    def draw(self) -> Move:
        """One move; the same on each store it is called with."""
        moves = (
            (self.offer, 3),
            (self.lease_tasks, 8),
            (self.append_played, 10),
            (self.lease_groups, 12),
            (self.append_scored, 12),
            (self.acknowledge, 10),
            (self.give_back, 3),
            (self.extend, 2),
            (self.reopen, 2),
            (self.leases_of, 1),
            (self.advance, 3),
            (self.requeue, 1),
            (self.peek, 1),
        )
        names, weights = zip(*moves, strict=True)
        drawn: Callable[[], Move] = self.random.choices(names, weights)[0]
        return drawn()

    def learn(self, answer: object) -> None:
        """Remember the leases an answer gave."""
        for lease in getattr(answer, "leases", ()):
            self.leases.append(lease.lease_id)
            if lease.lease_id.startswith("task/"):
                task_id = lease.lease_id.split("/", 2)[2]
                self.tasks.append((task_id, lease.lease_id, lease.attempt))

    def offer(self) -> Move:
        start = max(0, self.num_tasks - 1)
        self.num_tasks = start + self.random.randint(1, 6)
        tasks = [
            bare_task(f"t/{i}", purpose=Purpose.EVALUATION if i % 5 == 0 else Purpose.TRAINING)
            for i in range(start, self.num_tasks)
        ]
        cursor = CursorMove(expected=str(start), next=str(self.num_tasks))
        chosen = cursor if self.random.random() < 0.2 else None
        return lambda store: store.offer_tasks(self.run, tasks, chosen)

    def lease_tasks(self) -> Move:
        num = self.random.randint(1, 4)
        return lambda store: store.lease_tasks(self.run, worker="c", max_tasks=num, lease_s=60)

    def append_played(self) -> Move:
        recent = self.tasks[-8:]
        picked = self.random.sample(recent, min(len(recent), self.random.randint(1, 3)))
        oldest = max(0, self.policy.number - self.random.randint(0, 2))
        newest = self.policy.number + (self.random.random() < 0.05)
        span = VersionSpan(lineage=self.policy.lineage, oldest=oldest, newest=newest)
        groups = [
            bare_group(
                task_id,
                lease_id,
                attempt=attempt,
                versions=(span,),
                size=2 if self.random.random() < 0.95 else 3,
                digest="d" if self.random.random() < 0.97 else "e",
                num_discarded=self.random.choice((0, 0, 0, 1)),
            )
            for task_id, lease_id, attempt in picked
        ]
        self.groups.extend(groups)
        by_number = self.random.random() < 0.1
        stage = Stage.EVALUATION
        if not by_number and picked:
            is_training = int(picked[0][0][2:]) % 5
            stage = Stage.UNSCORED if is_training else Stage.EVALUATION
        return lambda store: store.append_groups(self.run, stage, groups)

    def lease_groups(self) -> Move:
        num = self.random.randint(1, 4)
        stage = self.random.choice((Stage.UNSCORED, Stage.UNSCORED, Stage.SCORED, *Stage))
        query = GroupQuery(
            stage=stage,
            worker=f"w{self.random.randint(0, 2)}",
            max_groups=num,
            min_groups=self.random.randint(1, num),
            lease_s=self.random.choice((30, 60)),
            max_staleness=self.random.choice((None, 1, 3)),
            task_id_prefix=self.random.choice(("", "t/1")) if stage is Stage.EVALUATION else "",
        )
        return lambda store: store.lease_groups(self.run, query)

    def append_scored(self) -> Move:
        unscored = [lease_id for lease_id in self.leases[-15:] if lease_id.startswith("unscored/")]
        by_task = {group.task_id: group for group in self.groups}
        picked = self.random.sample(unscored, min(len(unscored), 2))
        groups = [
            replace(by_task[lease_id.split("/", 2)[2]], lease_id=lease_id) for lease_id in picked
        ]
        return lambda store: store.append_groups(self.run, Stage.SCORED, groups)

    def acknowledge(self) -> Move:
        items = [
            Acknowledgement(
                lease_id=lease_id,
                outcome=(
                    outcome := self.random.choice((Outcome.CONSUMED, Outcome.CONSUMED, *Outcome))
                ),
                reason="oversize" if outcome is Outcome.DROPPED else "",
            )
            for lease_id in self.some_leases()
        ]
        return lambda store: store.acknowledge(self.run, items)

    def give_back(self) -> Move:
        items = [
            GivenBack(
                lease_id=lease_id,
                reason="broken",
                num_trajectories=self.random.randint(0, 2),
                failed=self.random.random() < 0.6,
                set_aside=self.random.random() < 0.1,
            )
            for lease_id in self.some_leases()
        ]
        return lambda store: store.give_back(self.run, items)

    def extend(self) -> Move:
        leases = self.some_leases()
        return lambda store: store.extend(self.run, leases, 60)

    def reopen(self) -> Move:
        leases = self.some_leases()[: self.random.choice((1, 1, 2, 4))]
        room = self.random.choice((12, 1 << 40))
        return lambda store: store.reopen(self.run, leases, lease_s=60, max_bytes=room)

    def leases_of(self) -> Move:
        stage, worker = self.random.choice(list(Stage)), f"w{self.random.randint(0, 2)}"
        return lambda store: store.leases_of(self.run, stage, worker)

    def advance(self) -> Move:
        step = self.random.choice((1, 1, 1, 0, -1))
        version = replace(self.policy, number=max(0, self.policy.number + step))
        if self.random.random() < 0.03:
            version = PolicyVersion(lineage=f"l{self.random.randint(0, 3)}", number=0)
        if version.lineage == self.policy.lineage:
            self.policy = max(self.policy, version)
        trained = [held for held in self.leases[-12:] if held.startswith("scored/")]
        room = self.random.randint(4, 12)

        async def move(store: Store) -> object:
            credits = await store.advance_policy(
                self.run, version, trained_lease_ids=trained, max_outstanding_groups=room
            )
            self.policy = version
            return credits

        return move

    def requeue(self) -> Move:
        async def move(store: Store) -> object:
            letters = await store.dead_letters(self.run, 2)
            return letters, await store.requeue(self.run, [letter.group_id for letter in letters])

        return move

    def peek(self) -> Move:
        stage = self.random.choice(list(Stage))
        return lambda store: store.peek(self.run, stage, 3)

    def some_leases(self) -> list[str]:
        recent = self.leases[-12:]
        return self.random.sample(recent, min(len(recent), self.random.randint(1, 4)))


async def answer_of(move: Move, store: Store) -> object:
    try:
        return await move(store)
    except DialoopError as error:
        return type(error), error.reason


async def play_out(seed: int, redis_url: str) -> set[str]:
    """Play one schedule on both stores; the states and drops its training groups came to."""
    clock, run = Clock(), new_run()
    limits = Limits(max_attempts=3, max_deliveries=2, max_dead_letters=1, lease_s=60)
    twin, real = MemoryStore(limits, clock=clock), RedisStore(redis_url, limits, clock=clock)
    schedule = Schedule(seed, run)
    # The first lease fixes the tokens, so that lease ids are the same from here on.
    first = [bare_task("t/0", purpose=Purpose.EVALUATION)]
    moves: list[Move] = [lambda s: s.offer_tasks(run, first, None), schedule.lease_tasks()]
    seen = set[str]()
    for number in range(NUM_MOVES):
        move = moves[number] if number < len(moves) else schedule.draw()
        expected = await answer_of(move, twin)
        assert await answer_of(move, real) == expected, f"seed {seed}, move {number}"
        schedule.learn(expected)
        before, after = await twin.stats(run), await real.stats(run)
        assert replace(after, store=before.store) == before, f"seed {seed}, after move {number}"
        assert_adds_up(after)
        seen |= {state for state, count in after.training.groups.items() if count}
        seen |= set(after.training.groups_dropped)
        if schedule.random.random() < 0.08 and number >= len(moves):
            clock.pass_s(schedule.random.choice((5, 20, 65)))
    await real.purge(run)
    await real.close()
    return seen


async def test_redis_and_its_twin_give_the_same_answers(redis_url: str) -> None:
    seen = set[str]()
    for seed in range(10):
        seen |= await play_out(seed, redis_url)
    assert set(State) <= seen, "the schedules reach every state"
    assert {DEAD_LETTER, DEAD_LETTER_FORGOTTEN} <= seen
