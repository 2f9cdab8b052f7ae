"""Environments of ours played by openenv-core's client: sessions, correlation, guard, no leaks."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import websockets
from dialoop.environments import ChatEnv, arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.rest_world import failing_environment
from tests.support.waiting import PATIENCE_S

REASON = "openenv-core brings gradio and fastmcp: see infra/test_compat.sh"


def door(**settings):
    door_settings = EnvironmentSettings(rest_port=0, drain_s=1, openenv=True, **settings)
    return serving(
        door_settings, Catalogue([arithmetic(), failing_environment(), Breaks(name="breaks")])
    )


@pytest.fixture
def core():
    return pytest.importorskip("openenv.core", reason=REASON)


def client_of(core, server, environment: str = "arithmetic", credentials: str = "", **options):
    base_url = f"http://{credentials}{server.rest_address}/openenv/{environment}"
    return core.GenericEnvClient(base_url=base_url, **options)


def socket_of(server, environment: str = "arithmetic", **options):
    return websockets.connect(f"ws://{server.rest_address}/openenv/{environment}/ws", **options)


async def ask(socket, kind: str, **data):
    await socket.send(json.dumps({"type": kind} | ({"data": data} if data else {})))
    return json.loads(await socket.recv())


async def test_their_client_plays_an_environment_of_ours_to_its_end(core):
    async with door() as server, client_of(core, server) as client:
        opening = await client.reset(task_key="35+40", seed=3)
        assert "35" in opening.observation["text"]
        assert (opening.reward, opening.done) == (None, False)
        result = await client.step({"message": "Result=75<submit>"})
        assert result.done
        assert result.reward == 1.0
        assert sum(result.observation["rewards"].values()) == 1.0
        assert result.observation["messages"][-1]["content"] == "Result=75<submit>"
        state = await client.state()
        assert state["step_count"] == 1
        assert state["episode_id"] == result.observation["episode_id"]
        again = await client.reset(task_key="35+40", seed=3)
        assert again.observation["messages"] == opening.observation["messages"]


async def test_sockets_are_sessions_that_end_with_them(core):
    async with door(capacity=2) as server:
        async with client_of(core, server) as first, client_of(core, server) as second:
            a = await first.reset(task_key="35+40")
            b = await second.reset(task_key="35+40")
            assert a.observation["episode_id"] != b.observation["episode_id"]
            await first.step({"message": "Result=1<submit>"})
            assert (await second.state())["step_count"] == 0
            async with client_of(core, server) as third:
                with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                    await third.reset(task_key="35+40")
        async with client_of(core, server) as third, asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await third.reset(task_key="35+40")
                    break
                except RuntimeError:
                    await asyncio.sleep(0.05)


class Breaks(ChatEnv):
    """Cannot open."""

    def reset(self, task, seed):
        raise RuntimeError("secret text")


async def test_what_raises_here_tells_its_id_alone():
    async with door() as server:
        async with socket_of(server, "failing") as socket:
            await ask(socket, "reset", task_key="35+40")
            error = (await ask(socket, "step", message="<request><secret>x<call>"))["data"]
            assert error["observation"]["failures"][0]["owner"] == "TOOL"
            assert (error["done"], error["reward"]) == (True, None)
            assert "secret text" not in json.dumps(error)
        async with socket_of(server, "breaks") as socket:
            error = (await ask(socket, "reset", question="Hello?"))["data"]
            assert error["code"] == "EXECUTION_ERROR"
            assert "error_id" in error["message"]
            assert "secret" not in json.dumps(error)


async def test_the_token_opens_the_door_as_their_urls_password(core):
    async with door(token="a-token") as server:
        async with client_of(core, server, credentials="any:a-token@") as client:
            assert not (await client.reset(task_key="35+40")).done
        for credentials in ("", "any:wrong@"):
            with pytest.raises(ConnectionError, match="403"):
                await client_of(core, server, credentials=credentials).connect()


async def test_their_factories_find_schema_metadata_and_health():
    async with door() as server, httpx.AsyncClient() as http:
        base = f"http://{server.rest_address}/openenv/arithmetic"
        assert (await http.get(f"{base}/health")).json() == {"status": "healthy"}
        assert (await http.get(f"{base}/metadata")).json()["name"] == "arithmetic"
        schema = (await http.get(f"{base}/schema")).json()
        assert set(schema) == {"action", "observation", "state"}
        assert schema["action"]["required"] == ["message"]
        assert (await http.get(f"{base}/state")).json() == {"episode_id": None, "step_count": 0}
        documents = (await http.get(f"http://{server.rest_address}/openapi.json")).json()
        assert "/openenv/{environment}/step" in documents["paths"]


async def test_plain_http_goes_on_with_the_episode_it_names():
    """At their servers each request is a fresh environment."""
    async with door() as server, httpx.AsyncClient() as http:
        base = f"http://{server.rest_address}/openenv/arithmetic"
        opening = (await http.post(f"{base}/reset", json={"task_key": "35+40"})).json()
        episode = opening["observation"]["episode_id"]
        body = {"action": {"message": "Result=75<submit>", "metadata": {"step_index": 0}}}
        refused = await http.post(f"{base}/step", json=body)
        assert (refused.status_code, refused.json()["reason"]) == (400, "EPISODE_MISSING")
        body["episode_id"] = episode
        first = (await http.post(f"{base}/step", json=body)).json()
        assert (first["done"], first["reward"]) == (True, 1.0)
        assert (await http.post(f"{base}/step", json=body)).json() == first
        assert (await http.get(f"{base}/state/{episode}")).json()["step_count"] == 1
        other = await http.post(f"http://{server.rest_address}/openenv/failing/step", json=body)
        assert other.json()["reason"] == "SESSION_CONFLICT"
        assert (await http.post(f"{base}/step", content=b"[")).json()["reason"] == "INVALID_JSON"


async def test_a_step_that_is_asked_twice_is_taken_once():
    async with door() as server, socket_of(server) as socket:
        await ask(socket, "reset", task_key="35+40")
        action = {"message": "Result=75<submit>", "metadata": {"step_index": 0}}
        first = await ask(socket, "step", **action)
        assert await ask(socket, "step", **action) == first
        assert first["data"]["observation"]["step_index"] == 1
        gap = await ask(socket, "step", message="x", metadata={"step_index": 7})
        assert gap["data"]["reason"] in ("STEP_GAP", "EPISODE_DONE")
        over = await ask(socket, "step", message="x")
        assert over["data"]["reason"] == "EPISODE_DONE"


async def test_what_cannot_be_read_is_refused_and_the_session_goes_on():
    async with door() as server, socket_of(server) as socket:
        reasons = []
        for text in ("[", "[1]", '{"type": "nonsense"}', '{"type": "step", "data": {"text": 1}}'):
            await socket.send(text)
            reasons.append(json.loads(await socket.recv())["data"]["code"])
        assert reasons == ["INVALID_JSON", "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR"]
        early = await ask(socket, "step", message="x")
        assert early["data"]["reason"] == "NOT_RESET"
        unknown = await ask(socket, "reset", task_key="no such task")
        assert unknown["data"]["reason"] == "TASK_NOT_FOUND"
        assert (await ask(socket, "reset", task_key="35+40"))["type"] == "observation"


async def test_foreign_pages_and_oversized_messages_are_kept_out():
    async with door(max_message_bytes=1 << 20) as server:
        with pytest.raises(websockets.InvalidStatus, match="403"):
            await socket_of(server, origin="http://evil.example").__aenter__()
        with pytest.raises(websockets.InvalidStatus, match="403"):
            await socket_of(server, additional_headers={"host": "evil.example"}).__aenter__()
        async with socket_of(server) as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await ask(socket, "step", message="x" * (2 << 20))
        async with socket_of(server) as socket:
            assert (await ask(socket, "reset", task_key="35+40"))["type"] == "observation"


async def test_the_door_is_closed_unless_it_is_asked_for():
    settings = EnvironmentSettings(rest_port=0, drain_s=1)
    async with serving(settings, Catalogue([arithmetic()])) as server, httpx.AsyncClient() as http:
        url = f"http://{server.rest_address}/openenv/arithmetic"
        assert (await http.get(f"{url}/health")).status_code == 404
        with pytest.raises(websockets.InvalidStatus):
            await socket_of(server).__aenter__()
