"""Requests go to the replicas in rotation, which change while requests are under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dialoop.agents import AgentConnection
from dialoop.chat import History, Message
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import Unavailable
from dialoop_services.collector import replicas as module
from dialoop_services.collector.agents import RecordingReplicas
from dialoop_services.collector.replicas import Replicas

from tests.support.waiting import until

PROMPT = History((Message(role="user", content="1+1"),))
QUICK = RetryPolicy(max_attempts=3, first_wait_s=0.001, max_wait_s=0.001)


class Replica:
    """Answers with its name, or fails as one that is away."""

    def __init__(self, name: str, *, is_away: bool = False) -> None:
        self.name, self.is_away = name, is_away
        self.num_asked = 0

    async def generate(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        self.num_asked += 1
        if self.is_away:
            raise Unavailable("Away.")
        return (self.name,)

    async def create(self, recording_id: str, **_: Any) -> AgentConnection:
        self.num_asked += 1
        return AgentConnection(base_url=f"http://{self.name}/{recording_id}")


async def test_requests_go_to_those_in_rotation_alone() -> None:
    a, b, c = Replica("a"), Replica("b"), Replica("c")
    replicas: Any = Replicas((a, b), QUICK)
    replicas.update((b, c))
    answers = {(await replicas.generate(PROMPT))[0] for _ in range(16)}
    assert answers == {"b", "c"}
    assert a.num_asked == 0


async def test_what_was_noticed_of_a_replica_that_stays_is_kept() -> None:
    away, well = Replica("away", is_away=True), Replica("well")
    slow = RetryPolicy(max_attempts=3, first_wait_s=60.0, max_wait_s=60.0)
    replicas: Any = Replicas((away, well), slow)
    for _ in range(2):
        assert await replicas.generate(PROMPT) == ("well",)
    num_asked = away.num_asked
    assert num_asked == 1
    replicas.update((away, well, Replica("new")))
    for _ in range(4):
        await replicas.generate(PROMPT)
    assert away.num_asked == num_asked  # still set aside


async def test_a_request_waits_for_the_first_replica_that_joins() -> None:
    replicas: Any = Replicas((), QUICK)
    waiting = asyncio.create_task(replicas.generate(PROMPT))
    await until(lambda: replicas._joined._waiters)
    replicas.update((Replica("first"),))
    assert await waiting == ("first",)


async def test_a_request_that_no_replica_can_take_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_FOR_ONE_S", 0.001)
    with pytest.raises(Unavailable, match="No inference replica is in rotation"):
        await Replicas((), QUICK).generate(PROMPT)
    with pytest.raises(Unavailable, match="No inference replica is in rotation"):
        await RecordingReplicas((), QUICK).create("r")


async def test_agents_are_recorded_at_those_in_rotation() -> None:
    a, b = Replica("a"), Replica("b")
    recordings: Any = RecordingReplicas((a,), QUICK)
    recordings.update((b,))
    assert (await recordings.create("r")).base_url == "http://b/r"
    assert a.num_asked == 0
