"""Calls inside one process behave as calls over the wire: each fact is shown of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from dialoop import errors
from dialoop.clients.channel import Channel, Rpc
from dialoop.clients.environment import CLOSE_SESSION, GET_SESSION, EnvironmentClient
from dialoop.clients.interact import InteractiveSessions
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.environment.serving import serving_on
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import GrpcServer
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.runtime.logs import log_fields

from tests.support.waiting import PATIENCE_S

NAME = "dialoop.v1.EnvironmentService"
INTERACT: Rpc[Any, Any] = Rpc(f"/{NAME}/Interact", pb.InteractRequest, pb.InteractResponse)
ONCE = RetryPolicy(max_attempts=1)
log = logging.getLogger("dialoop_services.test")


class Probe(stubs.EnvironmentServiceServicer):
    """Does to each call what the test wants, and notes what became of it."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.seconds = 0.0
        self.error: Exception | None = None
        self.worker: asyncio.Task[Any] | None = None
        self.cleaner: asyncio.Task[Any] | None = None
        self.seen: list[Any] = []

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        self.started.set()
        self.seen.append(request)
        log.warning("Called.")
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.ended.set()
        if self.error:
            raise self.error
        return pb.CloseSessionResponse(closed=True)

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:  # noqa: N802
        self.started.set()
        self.worker = asyncio.current_task()
        try:
            async for request in requests:
                yield pb.InteractResponse(request_id=request.request_id)
            if self.error:
                raise self.error
        finally:
            self.cleaner = asyncio.current_task()
            self.ended.set()


class Way:
    """A server of one kind, and channels to it."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self.kind = kind
        self.settings = load(ServerSettings, **settings)
        self._token = self.settings.token.get_secret_value()
        self.network = InProcessNetwork(
            token=self._token, max_message_bytes=self.settings.max_message_bytes
        )

    def server(self) -> GrpcServer:
        if self.kind == "grpc":
            return GrpcServer(self.settings)
        return self.network.server("probe", drain_s=self.settings.drain_s)

    def channel(self, server: GrpcServer, *, token: str | None = None) -> Channel:
        if self.kind == "grpc":
            return Channel(
                server.address, retry=ONCE, token=self._token if token is None else token
            )
        return self.network.connect("probe", retry=ONCE, token=token)


@asynccontextmanager
async def probing(
    kind: str, probe: Probe | None = None, **settings: Any
) -> AsyncIterator[tuple[Probe, Channel]]:
    way, probe = Way(kind, **settings), probe or Probe()
    server = way.server()
    server.add(stubs.add_EnvironmentServiceServicer_to_server, probe, NAME)
    async with server, way.channel(server) as channel:
        yield probe, channel


def both(fact: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("kind", ["grpc", "in_process"])(fact)


def close(channel: Channel, session: str = "s", **options: Any) -> Any:
    return channel.call(CLOSE_SESSION, pb.CloseSessionRequest(session_id=session), **options)


async def make_requests(*ids: str) -> AsyncIterator[pb.InteractRequest]:
    for request_id in ids:
        yield pb.InteractRequest(request_id=request_id)


@both
async def test_an_answer_comes_and_the_request_was_copied(kind: str) -> None:
    request = pb.CloseSessionRequest(session_id="s")
    async with probing(kind) as (probe, channel):
        assert (await channel.call(CLOSE_SESSION, request)).closed
    assert probe.seen == [request]
    assert probe.seen[0] is not request


@both
@pytest.mark.parametrize("error", [errors.Busy("b", reason="SESSION_BUSY", remedy="Wait."), None])
async def test_errors_have_class_reason_and_remedy(kind: str, error: Exception | None) -> None:
    async with probing(kind) as (probe, channel):
        probe.error = error or RuntimeError("secret")
        with pytest.raises(errors.DialoopError) as caught:
            await close(channel)
    assert "secret" not in str(caught.value)
    assert type(caught.value) is (errors.Busy if error else errors.InternalError)
    if error:
        assert (caught.value.reason, caught.value.remedy) == ("SESSION_BUSY", "Wait.")


@both
async def test_a_rpc_that_nobody_wrote_is_unsupported(kind: str) -> None:
    unknown: Rpc[Any, Any] = Rpc("/x.Y/Z", pb.GetSessionRequest, pb.GetSessionResponse)
    async with probing(kind) as (_, channel):
        with pytest.raises(errors.Unsupported) as caught:
            await channel.call(GET_SESSION, pb.GetSessionRequest())
        assert caught.value.reason == "NOT_SERVED"
        with pytest.raises(errors.Unsupported):
            await channel.call(unknown, pb.GetSessionRequest())


@both
async def test_a_deadline_ends_the_wait_and_the_work(kind: str) -> None:
    async with probing(kind) as (probe, channel):
        probe.seconds = 600
        with pytest.raises(errors.DeadlineExceeded):
            await close(channel, deadline_s=0.2)
        await asyncio.wait_for(probe.ended.wait(), PATIENCE_S)


@both
async def test_a_caller_who_leaves_takes_the_work_along(kind: str) -> None:
    async with probing(kind) as (probe, channel):
        probe.seconds = 600
        calling = asyncio.create_task(close(channel))
        await probe.started.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(probe.ended.wait(), PATIENCE_S)


@both
async def test_a_closed_channel_ends_its_calls_and_takes_no_more(kind: str) -> None:
    async with probing(kind) as (probe, channel):
        probe.seconds = 600
        calling = asyncio.create_task(close(channel))
        await probe.started.wait()
        await channel.close()
        for call in (calling, close(channel)):
            with pytest.raises(errors.Unavailable) as caught:
                await call
            assert caught.value.reason == "CHANNEL_CLOSED"


@both
async def test_a_stream_gives_its_answers_and_then_its_error(kind: str) -> None:
    async with probing(kind) as (probe, channel):
        probe.error = errors.NotFound("n", reason="SESSION_LOST")
        request_ids: list[str] = []

        async def read() -> None:
            async for answer in channel.exchange(INTERACT, make_requests(*map(str, range(100)))):
                request_ids.append(answer.request_id)  # noqa: PERF401 - those before the error count

        with pytest.raises(errors.NotFound) as caught:
            await read()
    assert request_ids == [str(number) for number in range(100)]
    assert caught.value.reason == "SESSION_LOST"


@both
async def test_a_reader_who_leaves_ends_the_stream(kind: str) -> None:
    async def endless() -> AsyncIterator[pb.InteractRequest]:
        while True:
            yield pb.InteractRequest(request_id="x" * 10_000)

    async with probing(kind) as (probe, channel):
        answers = channel.exchange(INTERACT, endless())
        assert (await anext(answers)).request_id
        await answers.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(probe.ended.wait(), PATIENCE_S)
        assert probe.cleaner is probe.worker  # and not when Python finds the generator


@both
async def test_requests_that_fail_to_come_end_the_call(kind: str) -> None:
    async def breaking() -> AsyncIterator[pb.InteractRequest]:
        yield pb.InteractRequest(request_id="a")
        raise ValueError("no more")

    async with probing(kind) as (probe, channel):
        with pytest.raises(errors.Unavailable):
            _ = [answer async for answer in channel.exchange(INTERACT, breaking())]
        await asyncio.wait_for(probe.ended.wait(), PATIENCE_S)


@both
@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_refused(kind: str, token: str) -> None:
    way = Way(kind, token="right")
    server = way.server()
    server.add(stubs.add_EnvironmentServiceServicer_to_server, Probe(), NAME)
    async with server, way.channel(server, token=token) as channel, way.channel(server) as rightful:
        with pytest.raises(errors.Unauthenticated):
            await close(channel)
        assert (await close(rightful)).closed


@both
async def test_a_message_over_the_limit_is_refused(kind: str) -> None:
    async with probing(kind, max_message_bytes=1024) as (probe, channel):
        with pytest.raises(errors.CapacityExhausted) as caught:
            await close(channel, "x" * 2000)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert not probe.seen


@both
async def test_the_log_fields_of_caller_and_service_stay_apart(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from dialoop_services.runtime.logs import _fields

    seen: list[dict[str, object]] = []
    caplog.handler.addFilter(lambda record: bool(seen.append(dict(_fields.get())) or True))
    async with probing(kind) as (_, channel):
        with log_fields(group_id="caller's"):
            await close(channel, "mine")
            assert _fields.get() == {"group_id": "caller's"}
    assert {"rpc": "EnvironmentService.CloseSession", "session_id": "mine"} in seen
    assert not any("group_id" in fields for fields in seen)


@both
async def test_leaving_lets_calls_end_and_cuts_those_that_take_too_long(kind: str) -> None:
    for seconds, drain_s in ((0.3, 30), (600, 0.1)):
        way, probe = Way(kind, drain_s=drain_s), Probe()
        probe.seconds = seconds
        server = way.server()
        server.add(stubs.add_EnvironmentServiceServicer_to_server, probe, NAME)
        async with AsyncExitStack() as exits:
            async with server:
                channel = await exits.enter_async_context(way.channel(server))
                calling = asyncio.create_task(close(channel))
                await probe.started.wait()
            if seconds < drain_s:
                assert (await calling).closed
            else:
                with pytest.raises(errors.Unavailable):
                    await calling
            with pytest.raises(errors.Unavailable):
                await close(channel)


async def test_a_service_that_comes_back_is_found_by_the_channels_that_were_there() -> None:
    network = InProcessNetwork()
    async with network.connect("probe") as channel:
        calling = asyncio.create_task(close(channel))  # retried until somebody is there
        for _ in range(2):
            server = network.server("probe")
            server.add(stubs.add_EnvironmentServiceServicer_to_server, Probe(), NAME)
            async with server:
                await channel.wait_until_connected(timeout_s=PATIENCE_S)
                assert (await close(channel)).closed
                assert (await calling).closed
        with pytest.raises(errors.Unavailable):
            await channel.wait_until_connected(timeout_s=0.05)


async def test_two_servers_of_one_name_are_refused() -> None:
    network = InProcessNetwork()
    async with network.server("a"):
        with pytest.raises(errors.InvalidConfig, match="Two servers"):
            await network.server("a").__aenter__()


@both
async def test_the_stream_of_sessions_plays_an_episode(kind: str) -> None:
    way = Way(kind)
    server = way.server()
    catalogue = Catalogue([arithmetic()])
    async with (
        serving_on(server, EnvironmentSettings(), catalogue),
        way.channel(server) as channel,
        InteractiveSessions(channel) as sessions,
    ):
        page = await EnvironmentClient(channel).list_tasks("arithmetic", split="train")
        await sessions.create_session("s", "arithmetic")
        opening = await sessions.reset("s", episode=1, split="train", task_key=page.tasks[0].key)
        assert opening.history.prompt is not None
        with pytest.raises(errors.NotFound):
            await sessions.reset("gone", episode=1, split="train", task_key="x")
