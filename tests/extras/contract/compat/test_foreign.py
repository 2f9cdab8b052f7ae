"""Environments that begin elsewhere: opened once, owned failures, nothing leaks, at every door."""

from __future__ import annotations

import asyncio

import pytest
from dialoop.chat import Message
from dialoop.environments import OpensSlowly
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.trajectory import DoneReason, Owner
from dialoop_extras.foreign.driver import (
    ForeignEnvironment,
    ForeignReset,
    ForeignStep,
    NumberedTasks,
)

from tests.support.environment_doors import at, open_session, play, reason_of, say, texts
from tests.support.waiting import until

DOORS = ("grpc", "rest", "sdk", "in_process")


class Counting:
    """Counts what it is told; two moves end an episode."""

    def __init__(self) -> None:
        self.begun, self.ended, self.moves = 0, [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def begin(self, task, seed):
        self.begun += 1
        await self.gate.wait()
        if task.question == "refuse":
            raise RuntimeError("secret text")
        return ForeignReset(place=[seed], messages=(Message(role="user", content=f"seed {seed}"),))

    async def move(self, place, history):
        text = history[-1].text
        self.moves.append((place[0], text))
        if text == "break":
            raise RuntimeError("secret text")
        place.append(text)
        if text == "end":
            return ForeignStep(reward=float("nan") if "nan" in place else 2.0, terminated=True)
        return ForeignStep(messages=(Message(role="user", content="go on"),), reward=0.5)

    async def end(self, place):
        self.ended.append(place[0])


def environment(driver: Counting, **options) -> ForeignEnvironment:
    return ForeignEnvironment(
        name="elsewhere", driver=driver, tasks=NumberedTasks(10, 2), **options
    )


@pytest.mark.parametrize("door", DOORS)
async def test_an_episode_elsewhere_is_played_at_every_door(door):
    driver = Counting()
    made = environment(driver, system_prompt="Be brief.")
    assert isinstance(made, OpensSlowly)
    async with at(door, made) as client:
        opening = await open_session(client, "elsewhere", split="heldout", task_key="1")
        assert texts(opening) == ["Be brief.", "seed 11"]
        first, last = await play(client, "hello", "end")
        assert texts(first) == ["Be brief.", "seed 11", "hello", "go on"]
        assert [(r.name, r.value) for r in first.rewards] == [("reward", 0.5)]
        assert (last.terminated, last.done_reason) == (True, DoneReason.CONTENT)
        assert [r.value for r in last.rewards] == [2.0]
        await until(lambda: driver.ended == [11])
        assert await reason_of(client.step("s", episode=1, step_index=2, history=say("x"))) == (
            "EPISODE_DONE"
        )


async def test_a_reset_that_is_asked_twice_begins_once():
    driver = Counting()
    driver.gate.clear()
    async with at("sdk", environment(driver)) as client:
        await client.create_session("s", "elsewhere")
        both = [asyncio.create_task(client.reset("s", episode=1, task_key="3")) for _ in range(2)]
        while not driver.begun:
            await asyncio.sleep(0.01)
        assert await reason_of(client.reset("s", episode=1, task_key="4")) == "SESSION_BUSY"
        driver.gate.set()
        first, second = await asyncio.gather(*both)
        assert texts(first) == texts(second) == ["seed 3"]
        assert texts(await client.reset("s", episode=1, task_key="3")) == ["seed 3"]
    assert driver.begun == 1
    assert driver.ended == [3]


async def test_a_session_closed_while_it_opens_is_lost():
    driver = Counting()
    driver.gate.clear()
    async with at("sdk", environment(driver)) as client:
        await client.create_session("s", "elsewhere")
        reset = asyncio.create_task(reason_of(client.reset("s", episode=1, task_key="3")))
        while not driver.begun:
            await asyncio.sleep(0.01)
        await client.close_session("s")
        assert await reset == "SESSION_LOST"


async def test_an_episode_that_cannot_begin_is_unavailable_without_its_text():
    driver = Counting()
    async with at("sdk", environment(driver)) as client:
        await client.create_session("s", "elsewhere")
        from dialoop.environments import Given

        with pytest.raises(Exception, match="error_id") as caught:
            await client.reset("s", episode=1, question=Given(query="refuse"))
        assert caught.value.reason == "ENVIRONMENT_UNAVAILABLE"
        assert "secret" not in str(caught.value)
        assert texts(await client.reset("s", episode=1, task_key="3")) == ["seed 3"]


async def test_an_opening_takes_no_longer_than_a_step_may():
    driver = Counting()
    driver.gate.clear()
    async with at("sdk", environment(driver), step_timeout_s=0.1) as client:
        await client.create_session("s", "elsewhere")
        assert await reason_of(client.reset("s", episode=1, task_key="3")) == "OPEN_TIMEOUT"


async def test_a_move_that_fails_is_the_environments_failure_and_ends_the_episode():
    driver = Counting()
    async with at("sdk", environment(driver)) as client:
        await open_session(client, "elsewhere", task_key="0")
        (outcome,) = await play(client, "break")
        (failure,) = outcome.failures
        assert (failure.owner, failure.reason) == (Owner.ENVIRONMENT, "ENVIRONMENT_FAILED")
        assert "secret" not in failure.message
        assert outcome.done_reason is DoneReason.ERROR
        assert not outcome.rewards


async def test_a_reward_that_is_no_number_is_a_failure_and_not_a_reward():
    async with at("sdk", environment(Counting())) as client:
        await open_session(client, "elsewhere", task_key="0")
        _, last = await play(client, "nan", "end")
        assert [f.owner for f in last.failures] == [Owner.REWARD]
        assert last.rewards == ()


async def test_a_group_opens_one_task_in_places_of_its_own():
    driver = Counting()
    async with at("sdk", environment(driver)) as client:
        group = await client.create_group(
            "g", "elsewhere", num_sessions=3, choice=TaskChoice(split="train", task_key="5")
        )
        assert [texts(opening) for opening in group.openings] == [["seed 5"]] * 3
        await play(client, "a", session=group.session_ids[0])
        await play(client, "b", session=group.session_ids[1])
    assert driver.moves == [(5, "a"), (5, "b")]
    assert driver.begun == 3


async def test_a_retried_step_moves_once():
    driver = Counting()
    async with at("sdk", environment(driver, max_turns=1)) as client:
        await open_session(client, "elsewhere", task_key="0")
        (first,) = await play(client, "hello")
        (again,) = await play(client, "hello")
        assert again.replayed
        assert first.truncated
        assert (first.done_reason, driver.moves) == (DoneReason.MAX_TURNS, [(0, "hello")])
