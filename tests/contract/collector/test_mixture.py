"""Jobs that train on several environments: which tasks are offered, and where a restart goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import ChatEnv, MaxTurns, RowTasks, arithmetic
from dialoop.errors import InvalidConfig, NotFound
from dialoop.local.client import LocalEnvironmentClient
from dialoop.trajectory import Task
from dialoop_services.collector.mixture import Cursor, Mixture, TaskStream
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.runtime.exit_reason import CONFIG_ERROR, ExitReason

from tests.support.collector_world import RUN, ScriptedPolicy, World, world
from tests.support.waiting import PATIENCE_S


def riddles() -> ChatEnv:
    rows = [{"key": f"r{number}", "query": f"Riddle {number}?"} for number in range(7)]
    return ChatEnv(name="riddles", tasks=RowTasks(rows), transforms=(MaxTurns(1),))


MIXED = [{"use": "riddles", "weight": 3.0}]


def task_supply(place: World, **settings: Any) -> TaskSupply:
    fields = {"run": RUN, "worker": "w", "page_size": 40, "shuffle_seed": 5, **settings}
    client: Any = LocalEnvironmentClient(arithmetic(), riddles())
    soon = RetryPolicy(max_attempts=None, total_s=5)
    return TaskSupply(CollectorSettings(**fields), place.replay, client, soon)


async def lease(place: World, count: int) -> list[Task]:
    await place.allow(count)
    answer = await place.replay.lease_tasks(RUN, worker="w", max_tasks=count, lease_s=60, wait_s=1)
    return [lease.task for lease in answer.leases]


async def draw(place: World, pages: int, **settings: Any) -> list[Task]:
    """The tasks of some pages, each by a collector that has just begun."""
    tasks: list[Task] = []
    await place.allow(0)
    for _ in range(pages):
        await task_supply(place, **settings).top_up()
        tasks += await lease(place, len(tasks) + 40)
    return tasks


async def test_environments_are_drawn_by_weight_and_none_of_their_tasks_twice():
    async with world() as place:
        tasks = await draw(place, 5, environments=MIXED)
    assert len(tasks) == 200
    counts = Counter(task.environment for task in tasks)
    assert counts["riddles"] == pytest.approx(150, abs=20)
    assert len({task.task_id for task in tasks}) == 200
    riddle_tasks = [task for task in tasks if task.environment == "riddles"]
    for start in range(0, len(riddle_tasks) - 7, 7):  # every epoch has each of them once
        assert len({task.key for task in riddle_tasks[start : start + 7]}) == 7


async def test_the_seed_decides_the_draws():
    task_ids = []
    for seed in (5, 5, 6):
        async with world() as place:
            tasks = await draw(place, 2, environments=MIXED, shuffle_seed=seed)
            task_ids.append([task.task_id for task in tasks])
    assert task_ids[0] == task_ids[1]
    assert task_ids[0] != task_ids[2]


async def test_a_job_goes_on_where_it_stood_when_environments_come_and_go():
    async with world() as place:
        alone = await draw(place, 1)
        assert {task.environment for task in alone} == {"arithmetic"}
        assert not (await place.replay.get_stats(RUN)).cursor.startswith("{")
        await task_supply(place, environments=MIXED).top_up()
        mixed = await lease(place, 80)
        await task_supply(place).top_up()
        again = await lease(place, 120)
    keys = [task.key for task in (*alone, *mixed, *again) if task.environment == "arithmetic"]
    assert len(set(keys)) == len(keys)
    assert {task.environment for task in mixed} == {"arithmetic", "riddles"}
    assert {task.environment for task in again} == {"arithmetic"}


async def test_both_environments_are_played():
    policy = ScriptedPolicy()
    async with world() as place:
        place.environment = LocalEnvironmentClient(arithmetic(), riddles())  # type: ignore[assignment]
        await place.allow(12)
        async with place.collecting(policy, page_size=12, environments=MIXED):
            await place.until(lambda counts: counts.num_groups_unscored >= 8)
    stops = Counter(sampling.stop for sampling in policy.sampling_log)
    assert set(stops) == {arithmetic().traits.stop, riddles().traits.stop}


def test_one_environment_cannot_be_named_twice():
    twice = (TaskStream(environment="a"), TaskStream(environment="a", weight=2.0))
    with pytest.raises(InvalidConfig, match="listed twice"):
        Mixture(twice)


def test_a_cursor_is_read_as_it_was_written():
    first = TaskStream(environment="a")
    cursor = Cursor(position=7, tokens={"a/train": "0:3", "b/train": "1:0"})
    assert Cursor.read(str(cursor), first) == cursor
    assert Cursor.read("0:5", first) == Cursor(tokens={"a/train": "0:5"})
    assert Cursor.read("", first) == Cursor()


async def test_no_task_is_offered_before_the_queue_knows_a_policy():
    """A queue that lost its state gets its position in the data together with the policy."""
    async with world() as place:
        assert not await task_supply(place).top_up()
        await place.replay.offer_tasks(RUN, (), expected_cursor="", next_cursor="")
        assert (await place.training()).num_tasks_offered == 0
        await place.allow(0)
        assert await task_supply(place).top_up()
        assert (await place.training()).num_tasks_offered == 40


async def test_an_environment_that_does_not_exist_ends_the_collector_which_no_wait_would_mend():
    async with world() as place:
        await place.allow(40)
        supply = task_supply(place, environment={"use": "arithmetic", "name": "riddle"})
        with pytest.raises(NotFound, match="riddle") as caught:
            await asyncio.wait_for(supply.run(), PATIENCE_S)
    assert ExitReason.of(caught.value).exit_code == CONFIG_ERROR
