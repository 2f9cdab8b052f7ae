"""An agent gets a key that opens its own recording, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from dialoop.agents import AgentConnection, AgentHost, AgentTask, play_agent
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.errors import Unauthenticated
from dialoop.trajectory import Task

from tests.support.agent_world import ScriptedEngine, agent_world, make_tool_model

OWN = "the-own-token"
TASK = Task(task_id="t", environment="arithmetic", split="train", key="35+40")


@pytest_asyncio.fixture
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    directory = make_tool_model(tmp_path_factory.mktemp("keys") / "model")
    async with agent_world(directory, ScriptedEngine(directory, ["75"] * 9), token=OWN) as made:
        yield made


async def ask(connection: AgentConnection, **changes: str) -> str:
    options = {"base_url": connection.base_url, "api_key": connection.api_key} | changes
    async with openai.AsyncOpenAI(**options, max_retries=0) as client:
        message = {"role": "user", "content": "35+40"}
        answer = await client.chat.completions.create(model="tiny", messages=[message])
    return str(answer.choices[0].message.content)


async def test_an_agent_never_sees_a_token_of_the_services(world: Any) -> None:
    seen: list[AgentConnection] = []

    async def agent(task: AgentTask, connection: AgentConnection) -> float:
        seen.append(connection)
        return float("75" in await ask(connection))

    host = AgentHost(recordings=world.recordings)
    assert (await play_agent(TASK, agent=agent, host=host)).reward == 1.0
    assert (await play_agent(TASK, agent=agent, host=host)).reward == 1.0
    first, second = seen
    assert OWN not in repr(seen)
    assert first.api_key != second.api_key


async def test_a_recordings_key_opens_that_recording_alone(world: Any) -> None:
    mine, other = [await world.recordings.create(name) for name in ("mine", "other")]
    assert "75" in await ask(mine)
    plain = f"{world.url}/v1"
    for url, key in (
        (other.base_url, mine.api_key),
        (mine.base_url, other.api_key),
        (plain, mine.api_key),
        (f"{world.url}/recordings/there-is-none/v1", mine.api_key),
        (mine.base_url, "none"),
    ):
        with pytest.raises(openai.AuthenticationError):
            await ask(mine, base_url=url, api_key=key)
    for url in (plain, mine.base_url):
        assert "75" in await ask(mine, base_url=url, api_key=OWN), "as before"
    for path in ("/v1/models", "/metrics", "/recordings/mine/v1/../../other/v1/models"):
        headers = {"authorization": f"Bearer {mine.api_key}"}
        answer = await world.http.get(world.url + path, headers=headers)
        assert answer.status_code == 401, path


async def test_a_recordings_key_opens_no_rpc(world: Any) -> None:
    mine = await world.recordings.create("mine")
    async with Channel(world.channel.address, token=mine.api_key) as channel:
        with pytest.raises(Unauthenticated):
            await InferenceClient(channel).get_policy()


async def test_a_page_of_another_origin_does_not_use_a_key(world: Any) -> None:
    mine = await world.recordings.create("mine")
    headers = {"authorization": f"Bearer {mine.api_key}", "origin": "http://elsewhere"}
    answer = await world.post("/recordings/mine/v1/chat/completions", {}, headers=headers)
    assert answer.status_code == 403
