"""A storm of retries: one reply in five is lost on the way, and every step is asked twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import ArithmeticTasks, ExactResult, tool_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.connections import connection_to, copy, serving_connections

TASKS = ArithmeticTasks()
KEYS = TASKS.keys("train")
NUM_SESSIONS, NUM_TURNS, LOSS = 32, 4, 0.2
_DATA, _HEADERS = 0, 1


class FaultProxy:
    """Forwards HTTP/2; a reply that it loses takes its connection with it, as on a bad network."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = random.Random(7)
        self.num_lost = 0

    def listening(self):
        return serving_connections(self._serve)

    async def _serve(self, reader, writer) -> None:
        async with connection_to(self._port) as (upstream, to_upstream):
            sending = asyncio.create_task(copy(reader, to_upstream))
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._replies(upstream, writer)
            sending.cancel()

    async def _replies(self, upstream, writer) -> None:
        known_streams: set[bytes] = set()
        while True:
            head = await upstream.readexactly(9)
            body = await upstream.readexactly(int.from_bytes(head[:3]))
            stream = head[5:9]
            if head[3] in (_DATA, _HEADERS) and stream not in known_streams:
                known_streams.add(stream)
                if self._random.random() < LOSS:
                    self.num_lost += 1
                    return
            writer.write(head + body)
            await writer.drain()


def environment(runs: Counter):
    async def count(query: str) -> str:
        runs[query] += 1
        await asyncio.sleep(0.001)
        return f"run {runs[query]} of {query}"

    return tool_environment(
        name="counted", tasks=TASKS, tools=[count], rewards=[ExactResult()], max_turns=NUM_TURNS
    )


async def play(client: EnvironmentClient, number: int, *, twice: bool) -> list[object]:
    session, results = f"s{number}", []
    await client.create_session(session, "counted")
    task = {"split": "train", "task_key": KEYS[number]}
    opening = await client.reset(session, episode=1, **task)
    results.append(opening.history)
    for index in range(NUM_TURNS):
        text = f"<request><count>{number}.{index}<call>"
        answer = ChatHistory(response=History((Message(role="assistant", content=text),)))
        asking = [
            client.step(session, episode=1, step_index=index, history=answer)
            for _ in range(2 if twice else 1)
        ]
        outcomes = await asyncio.gather(*asking)
        assert all(o.history == outcomes[0].history for o in outcomes)
        results.append((outcomes[0].history, outcomes[0].done_reason, outcomes[0].rewards))
    assert await client.close_session(session) or twice
    return results


async def play_all(address: str, *, twice: bool) -> list[list[object]]:
    policy = RetryPolicy(max_attempts=60, first_wait_s=0.005, max_wait_s=0.05)
    async with contextlib.AsyncExitStack() as exits:
        channels = [
            await exits.enter_async_context(Channel(address, retry=policy)) for _ in range(8)
        ]
        clients = [EnvironmentClient(channel) for channel in channels]
        return await asyncio.gather(
            *(play(clients[n % 8], n, twice=twice) for n in range(NUM_SESSIONS))
        )


async def test_a_storm_of_retries_runs_no_tool_twice_and_changes_no_transcript():
    calm, stormy = Counter(), Counter()
    async with serving(EnvironmentSettings(), Catalogue([environment(calm)])) as server:
        expected = await play_all(server.address, twice=False)
    async with serving(EnvironmentSettings(), Catalogue([environment(stormy)])) as server:
        proxy = FaultProxy(server.port)
        async with proxy.listening() as address:
            results = await play_all(address, twice=True)
    assert results == expected
    assert set(stormy.values()) == {1}
    assert len(stormy) == NUM_SESSIONS * NUM_TURNS
    assert proxy.num_lost >= 40
