"""A request that kills an engine or a service is counted, closed by name, and blames no other."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from unittest.mock import AsyncMock

import pytest
from dialoop.agents import AgentConnection
from dialoop.chat import History, Message
from dialoop.clients.replay import TaskLease
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import Unavailable
from dialoop.testing import ScriptedPolicy as AnsweringPolicy
from dialoop.trajectory import Purpose, SamplingParams, Task
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from dialoop_services.collector.__main__ import make_collector
from dialoop_services.collector.agents import RecordingReplicas
from dialoop_services.collector.counters import Counters
from dialoop_services.collector.player import GroupPlay
from dialoop_services.collector.replicas import Replicas, RetryingSessions
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.hosting.in_process import InProcessNetwork

from tests.support.collector_world import ScriptedPolicy, adds_up, world
from tests.support.waiting import PATIENCE_S

POLICY = RetryPolicy(max_attempts=None, total_s=0.5, first_wait_s=0.001, max_wait_s=0.01)


def prompt(text: str) -> History:
    return History((Message(role="user", content=text),))


class Mortal:
    """A service that dies under a poisonous prompt or task, with all that it works on."""

    def __init__(self, policy, *, is_poison, notice_s=0.0) -> None:
        self.policy = policy
        self.is_poison = is_poison
        self.notice_s = notice_s
        self.running: dict[asyncio.Future[None], str] = {}
        self.deaths: Counter[str] = Counter()
        self.num_deaths = 0

    async def generate(self, history, **named):
        await self.work_on(history[-1].content)
        return await self.policy.generate(history, **named)

    async def create_session(self, session_id, environment):
        return 60.0

    async def reset(self, session_id, *, episode, split, task_key, seed=0):
        await self.work_on(task_key)

    async def work_on(self, text: str) -> None:
        dying = asyncio.get_running_loop().create_future()
        self.running[dying] = text
        try:
            is_poison = self.is_poison(text)
            await asyncio.wait([dying], timeout=0.002 if is_poison else 0.01)
            # What died with another one cannot kill those that have been tried again since.
            if is_poison and not dying.done():
                self.num_deaths += 1
                for other, content in self.running.items():
                    self.deaths[content] += 1
                    other.done() or other.set_result(None)
                await asyncio.sleep(self.notice_s)
            if dying.done():
                raise Unavailable("dead", reason="ENGINE_DIED")
        finally:
            del self.running[dying]


async def test_a_request_that_kills_its_engine_ends_and_those_beside_it_do_not():
    mortal = Mortal(AnsweringPolicy(["ok"]), is_poison=lambda text: text == "poison")
    replicas = Replicas([mortal], POLICY)
    texts = ["poison", *(f"innocent {number}" for number in range(12))]
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(
            *(replicas.generate(prompt(text)) for text in texts), return_exceptions=True
        )
    failed = {text: o for text, o in zip(texts, outcomes, strict=True) if isinstance(o, Exception)}
    assert list(failed) == ["poison"]
    assert failed["poison"].reason == "ENGINE_DIED"
    assert mortal.deaths["poison"] == mortal.num_deaths <= 2 + math.log2(len(texts))


async def test_those_beside_the_cause_are_answered_even_if_it_is_the_last_to_try_again():
    mortal = Mortal(AnsweringPolicy(["ok"]), is_poison=lambda t: t == "poison", notice_s=0.005)
    replicas = Replicas([mortal], POLICY)
    texts = ["poison", *(f"innocent {number}" for number in range(40))]
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(
            *(replicas.generate(prompt(text)) for text in texts), return_exceptions=True
        )
    assert [t for t, o in zip(texts, outcomes, strict=True) if isinstance(o, Exception)] == [
        "poison"
    ]
    assert mortal.num_deaths <= 2 + math.log2(len(texts)), "what is left halves with each death"


async def test_those_beside_a_second_cause_of_death_are_tried_one_after_the_other_too():
    mortal = Mortal(AnsweringPolicy(["ok"]), is_poison=lambda text: text.startswith("poison"))
    replicas = Replicas([mortal], POLICY)
    for cause in ("poison 1", "poison 2"):
        texts = [*(f"innocent {number} of {cause}" for number in range(12)), cause]
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(
                *(replicas.generate(prompt(text)) for text in texts), return_exceptions=True
            )
        failed = [t for t, o in zip(texts, outcomes, strict=True) if isinstance(o, Exception)]
        assert failed == [cause]


async def test_a_group_that_kills_the_environment_is_opened_once_more_and_not_by_its_channel_too():
    class Dying(EnvironmentServiceServicer):
        num_deaths = 0

        async def CreateSession(self, request, context):  # noqa: N802
            return pb.CreateSessionResponse(ttl_s=60)

        async def Reset(self, request, context):  # noqa: N802
            self.num_deaths += 1
            raise Unavailable("dead", reason="SERVICE_DIED")

    servicer, network = Dying(), InProcessNetwork()
    server = network.server("environment", drain_s=0)
    name = "dialoop.v1.EnvironmentService"
    server.add(add_EnvironmentServiceServicer_to_server, servicer, name)
    task = Task(task_id="t", environment="e", split="train", key="0", purpose=Purpose.TRAINING)
    lease = TaskLease(lease_id="l", task=task, attempt=1, expires_in_s=60, members=(0, 1, 2))
    settings = CollectorSettings(
        worker="w",
        environment_address="environment",
        replay_address="replay",
        inference_addresses=["inference"],
    )
    async with server, AsyncExitStack() as exits:
        collector = await make_collector(settings, Counters("w"), network.connect, exits)
        playing = collector._player.play(GroupPlay(lease=lease), SamplingParams(), AsyncMock())
        failed = await asyncio.wait_for(playing, PATIENCE_S)
    assert {failure.reason for failure in failed.values()} == {"service_died"}
    # The members that died together once, and one of them alone, whose verdict is that of all.
    assert servicer.num_deaths == len(lease.members) + 1


async def test_tasks_beside_one_that_kills_the_environment_are_opened():
    """Each by three members."""
    mortal = Mortal(None, is_poison=lambda key: key == "poison")
    sessions, keys = RetryingSessions(mortal, POLICY), ["poison", *map(str, range(6))] * 3

    async def open_task(number: int, key: str):
        await sessions.create_session(str(number), "e")
        await sessions.reset(str(number), episode=1, split="train", task_key=key)

    async with asyncio.timeout(PATIENCE_S):
        opened = [open_task(number, key) for number, key in enumerate(keys)]
        outcomes = await asyncio.gather(*opened, return_exceptions=True)
    assert [key for key, o in zip(keys, outcomes, strict=True) if isinstance(o, Exception)] == [
        "poison"
    ] * 3
    assert mortal.num_deaths <= 3 * (2 + math.log2(len(keys)))


async def test_a_task_that_opened_after_all_carries_no_verdict():
    class Once:
        def __init__(self) -> None:
            self.outcomes = iter([True, True, False, True, False])

        async def create_session(self, session_id, environment):
            return 60.0

        async def reset(self, session_id, **choice):
            if next(self.outcomes):
                raise Unavailable("dead", reason="SERVICE_DIED")

    sessions = RetryingSessions(Once(), POLICY)
    opening = partial(sessions.reset, "s", episode=1, split="train", task_key="k")
    with pytest.raises(Unavailable):
        await opening()  # died twice
    await opening()
    await opening()  # died once


async def test_a_task_that_kills_the_engine_is_closed_by_name_and_the_run_goes_on():
    poison: list[str] = []

    def is_poison(text: str) -> bool:
        poison[:] = poison or [text]  # the first question that is asked
        return text == poison[0]

    async with world() as w:
        await w.allow(4)
        mortal = Mortal(ScriptedPolicy(), is_poison=is_poison)
        async with w.collecting(Replicas([mortal], POLICY)), asyncio.timeout(PATIENCE_S):
            await w.until(lambda c: bool(c.num_groups_dropped) and c.num_groups_unscored >= 3)
        counts = await w.training()
    # Tries and halvings of what is suspected, attempts of the ledger, members.
    assert mortal.num_deaths <= (2 + math.log2(8)) * 3 * 2
    assert counts.num_groups_dropped == {"engine_died": 1}
    assert adds_up(counts)


async def test_a_run_whose_replica_never_comes_back_counts_against_its_agent():
    class Gone:
        async def create(self, *_, **__):
            return AgentConnection(base_url="http://replica")

        async def close(self, *_, **__):
            raise Unavailable("gone")

    brief = RetryPolicy(max_attempts=None, total_s=0.02, first_wait_s=0.001)
    recordings = RecordingReplicas([Gone()], brief)
    await recordings.create("r")
    with pytest.raises(Unavailable) as caught:
        await recordings.close("r")
    assert caught.value.reason == "SERVICE_DIED"
