"""OpenEnv servers as environments of ours, by openenv-core's own client and server."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from dialoop.errors import InvalidConfig
from dialoop.trajectory import Owner
from dialoop_extras.foreign.openenv import _Connection, openenv

from tests.support.environment_doors import at, open_session, play, reason_of, say, texts
from tests.support.waiting import PATIENCE_S

REASON = "openenv-core brings gradio and fastmcp: see infra/test_compat.sh"


def echo_app(*, places: int = 4):
    """Their server: it echoes, sleeps, breaks, or ends, as the message says."""
    server = pytest.importorskip("openenv.core.env_server", reason=REASON)

    class Said(server.Action):
        message: str

    class Heard(server.Observation):
        text: str = ""

    class Echo(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = server.State()

        def reset(self, seed=None, episode_id=None, question="", **options):
            self._state = server.State(episode_id=episode_id, step_count=0)
            return Heard(text=f"seed {seed} {question}".strip())

        def step(self, action, timeout_s=None, **options):
            self._state.step_count += 1
            if action.message.startswith("sleep"):
                time.sleep(0.5)
            if action.message == "break":
                raise RuntimeError("secret text")
            text = f"{self._state.step_count}:{action.message}"
            return Heard(text=text, reward=0.5, done=action.message == "end")

        @property
        def state(self):
            return self._state

    return server.create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=places)


@contextmanager
def serve(app):
    """Serve an ASGI application in a thread; yield its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws="websockets-sansio", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def url():
    with serve(echo_app()) as url:
        yield url


def echo(url: str, **options):
    return openenv(name="echo", url=url, observation_key="text", **options)


@pytest.mark.parametrize("door", ["grpc", "in_process"])
async def test_their_server_is_played_as_an_environment_of_ours(url, door):
    async with at(door, echo(url, system_prompt="Echo.")) as client:
        opening = await open_session(client, "echo", task_key="7")
        assert texts(opening) == ["Echo.", "seed 7"]
        first, last = await play(client, "hello", "end")
        assert texts(first) == ["Echo.", "seed 7", "hello", "1:hello"]
        assert [(r.name, r.value) for r in first.rewards] == [("openenv", 0.5)]
        assert last.terminated
        assert last.rewards[0].value == 0.5


async def test_episodes_have_sessions_of_their_own(url):
    async with at("sdk", echo(url)) as client:
        for session, key in (("a", "1"), ("b", "2")):
            await open_session(client, "echo", session, task_key=key)
        (a,) = await play(client, "x", session="a")
        (b,) = await play(client, "y", session="b")
        assert texts(a)[-1] == "1:x"
        assert texts(b)[-1] == "1:y"


async def test_a_reply_that_comes_late_is_never_taken_for_another(url):
    """Their client after a timeout gives each step the reply of the one before, for ever."""
    async with at("sdk", echo(url, timeout_s=0.2)) as client:
        await open_session(client, "echo", task_key="1")
        (slow,) = await play(client, "sleep")
        assert [failure.owner for failure in slow.failures] == [Owner.ENVIRONMENT]
        assert not slow.rewards
        refused = client.step("s", episode=1, step_index=1, history=say("next"))
        assert await reason_of(refused) == "EPISODE_DONE"
        again = await client.reset("s", episode=2, task_key="2")
        assert texts(again) == ["seed 2"]
        await asyncio.sleep(0.5)
        (outcome,) = await play(client, "new", episode=2)
        assert texts(outcome)[-1] == "1:new"


async def test_a_step_of_theirs_that_raises_is_a_failure_whose_text_stays_here(url):
    async with at("sdk", echo(url)) as client:
        await open_session(client, "echo", task_key="1")
        (outcome,) = await play(client, "break")
        (failure,) = outcome.failures
        assert failure.owner is Owner.ENVIRONMENT
        assert "secret" not in failure.message


async def test_a_full_server_is_busy_and_has_room_again_afterwards():
    with serve(echo_app(places=1)) as url:
        async with at("sdk", echo(url)) as client:
            await open_session(client, "echo", "a", task_key="1")
            await client.create_session("b", "echo")
            assert await reason_of(client.reset("b", episode=1, task_key="1")) == "CAPACITY"
            await client.close_session("a")
            async with asyncio.timeout(PATIENCE_S):
                while await _reason(client.reset("b", episode=1, task_key="1")):
                    await asyncio.sleep(0.05)


async def test_an_error_sent_before_the_request_is_read_all_the_same():
    with serve(echo_app(places=1)) as url:
        from openenv.core import GenericEnvClient

        async with GenericEnvClient(base_url=url) as first:
            await first.reset()
            late = GenericEnvClient(base_url=url)
            await late.connect()
            await asyncio.sleep(0.3)  # the server has refused it and hung up
            connection = _Connection(late)
            with pytest.raises(Exception, match="1000"):
                await connection.ask("reset")
            assert connection.parting_code == "CAPACITY_REACHED"


async def _reason(awaitable) -> str:
    try:
        await awaitable
    except Exception as error:
        return error.reason
    return ""


async def test_a_server_that_is_away_is_unavailable(url):
    async with at("sdk", echo("http://127.0.0.1:9", connect_timeout_s=1)) as client:
        await client.create_session("s", "echo")
        assert await reason_of(client.reset("s", episode=1, task_key="1")) == (
            "ENVIRONMENT_UNAVAILABLE"
        )


def test_without_the_package_the_pip_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(InvalidConfig, match=r"dialoop-extras\[openenv\]") as caught:
        openenv(name="echo", url="http://127.0.0.1:9")
    assert caught.value.reason == "PACKAGE_MISSING"
