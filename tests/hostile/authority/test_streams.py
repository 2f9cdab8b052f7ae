"""A stream ends within a second after the right with which it was opened has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from dialoop.v1.scope_pb2 import SCOPE_ENV, SCOPE_ROLLOUT
from dialoop_services.hosting import GrpcServer
from dialoop_services.inference.wires.openai.routes import error_answer
from dialoop_services.rest.http_routes import HttpAnswer, HttpRequest, HttpRoute
from dialoop_services.rest.routes import routes_of
from dialoop_services.rest.socket_routes import Socket, SocketRoute
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.runtime.access.tickets import Authority, Proofs
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.support.samples.scoped_services import OWN, descriptors, scope_in_proto, write_tokens

MINE, OTHER = "mine", "somebody-elses"
WITHIN_S = 1.0
SLACK_S = 0.5  # of a loaded machine
STREAMS = [rpc for service in descriptors() for rpc in service.methods if rpc.server_streaming]
UPLOADS = [
    rpc
    for service in descriptors()
    for rpc in service.methods
    if rpc.client_streaming and not rpc.server_streaming
]


def endless(rpc: MethodDescriptor, *, is_talking: bool) -> Any:
    """A servicer whose method never ends by itself: it talks all the time, or only once."""

    async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        yield GetMessageClass(rpc.output_type)()
        while True:
            await asyncio.sleep(0.02 if is_talking else 3600)
            yield GetMessageClass(rpc.output_type)()

    async def upload(self: Any, requests: Any, context: Any) -> Any:
        async for _ in requests:
            pass
        return GetMessageClass(rpc.output_type)()

    module = __import__(
        f"{rpc.containing_service.file.name.removesuffix('.proto').replace('/', '.')}_pb2_grpc",
        fromlist=["*"],
    )
    name = rpc.containing_service.name
    method = stream if rpc.server_streaming else upload
    kind = type("Endless", (getattr(module, f"{name}Servicer"),), {rpc.name: method})
    return getattr(module, f"add_{name}Servicer_to_server"), kind()


@contextlib.asynccontextmanager
async def serving(rpc: MethodDescriptor, *, is_talking: bool, **settings: Any) -> Any:
    server = GrpcServer(load(ServerSettings, token=OWN, drain_s=0.1, **settings))
    register, servicer = endless(rpc, is_talking=is_talking)
    server.add(register, servicer, rpc.containing_service.full_name)
    async with server:
        yield server


async def requests_without_end(rpc: MethodDescriptor) -> AsyncIterator[bytes]:
    while True:
        yield b""
        await asyncio.sleep(0.02)


def open_stream(channel: grpc.aio.Channel, rpc: MethodDescriptor, token: str) -> Any:
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    sent, got = (("unary", "stream")[s] for s in (rpc.client_streaming, rpc.server_streaming))
    request: Any = requests_without_end(rpc) if rpc.client_streaming else b""
    metadata = [("authorization", f"Bearer {token}")]
    return getattr(channel, f"{sent}_{got}")(path)(request, metadata=metadata)


async def status_at_the_end(call: Any) -> str:
    async with asyncio.timeout(30):
        return str((await call.code()).name)


@pytest.mark.parametrize("is_talking", [True, False])
@pytest.mark.parametrize("rpc", [*STREAMS, *UPLOADS], ids=lambda rpc: str(rpc.name))
async def test_a_stream_of_a_removed_token_ends(
    tmp_path: Path, rpc: MethodDescriptor, is_talking: bool
) -> None:
    scope = scope_in_proto(rpc)
    path = write_tokens(tmp_path / "tokens.toml", {MINE: [scope], OTHER: [scope]})
    async with (
        serving(rpc, is_talking=is_talking, token_file=path) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        removed, kept, owners = [open_stream(channel, rpc, token) for token in (MINE, OTHER, OWN)]
        reading = []
        for call in (removed, kept, owners) if rpc.server_streaming else ():
            await call.read()
            reading.append(asyncio.create_task(read_on(call)))
        await asyncio.sleep(0.3)
        write_tokens(path, {OTHER: [scope]})
        began = time.monotonic()
        # grpc.aio's client reports INTERNAL where its own send meets the end of the call.
        statuses = {"UNAUTHENTICATED"} | ({"INTERNAL"} if rpc.client_streaming else set())
        assert await status_at_the_end(removed) in statuses
        assert time.monotonic() - began < WITHIN_S + SLACK_S
        assert not kept.done()
        assert not owners.done()
        for call in (kept, owners):
            call.cancel()
        await asyncio.gather(*reading)


async def read_on(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


@pytest.mark.parametrize("rpc", STREAMS, ids=lambda rpc: str(rpc.name))
async def test_a_stream_of_a_token_or_ticket_that_runs_out_ends(
    tmp_path: Path, rpc: MethodDescriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dialoop_services.runtime.access.tickets._LEEWAY_S", 0.0)
    ends = datetime.now(UTC) + timedelta(seconds=1.5)
    secret = {MINE: [scope_in_proto(rpc)]}
    path = write_tokens(tmp_path / "tokens.toml", secret, expires=ends.isoformat())
    authority = Authority.of(OWN)
    assert authority is not None
    left_s = ends.timestamp() - time.time()
    ticket = authority.issue(run="r", role="trainer", valid_s=left_s)
    async with (
        serving(rpc, is_talking=False, token_file=path) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        calls = [open_stream(channel, rpc, token) for token in (MINE, Proofs(ticket).to("any"))]
        for call in calls:
            await call.read()
        statuses = {"UNAUTHENTICATED"} | ({"INTERNAL"} if rpc.client_streaming else set())
        for call in calls:
            assert await status_at_the_end(call) in statuses
        assert -0.1 < time.time() - ends.timestamp() < WITHIN_S + SLACK_S


@pytest.mark.parametrize(
    "rpc", [rpc for rpc in STREAMS if not rpc.client_streaming], ids=lambda rpc: str(rpc.name)
)
async def test_a_stream_over_rest_ends(tmp_path: Path, rpc: MethodDescriptor) -> None:
    scope = scope_in_proto(rpc)
    path = write_tokens(tmp_path / "tokens.toml", {MINE: [scope]})
    routes = {route.rpc.name: route for route in routes_of(rpc.containing_service)}
    url = "/".join(
        "x" if part.startswith("{") else part for part in routes[rpc.name].path.split("/")
    )
    async with (
        serving(rpc, is_talking=False, token_file=path, rest_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.rest_address}", timeout=30) as http,
    ):
        with ended_in_time(path):
            body = await rest_stream(http, routes[rpc.name].method, url, path)
    assert "UNAUTHENTICATED" in body


@contextlib.contextmanager
def ended_in_time(path: Path) -> Iterator[None]:
    yield
    assert time.time() - path.stat().st_mtime < WITHIN_S + SLACK_S


async def rest_stream(http: httpx.AsyncClient, method: str, url: str, path: Path) -> str:
    """The whole body of a stream whose token is removed once it has begun."""
    headers = {"authorization": f"Bearer {MINE}"}
    text = ""
    async with http.stream(method, url, headers=headers, json={}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for part in answer.aiter_text():
            if not text:
                write_tokens(path, {OTHER: ["env"]})
            text += part
    return text


async def test_server_sent_events_and_sockets_of_other_protocols_end(tmp_path: Path) -> None:
    async def events(request: HttpRequest, answer: HttpAnswer) -> None:
        while True:
            await answer.event({"n": 1})
            await asyncio.sleep(3600)

    async def socket(socket: Socket) -> None:
        await socket.send({"n": 1})
        await asyncio.sleep(3600)

    path = write_tokens(tmp_path / "tokens.toml", {MINE: ["rollout", "env"]})
    server = GrpcServer(load(ServerSettings, token=OWN, token_file=path, rest_port=0, drain_s=0.1))
    server.add_route(
        HttpRoute(
            name="Any.Events",
            scope=SCOPE_ROLLOUT,
            method="GET",
            path="/events",
            handle=events,
            errors=error_answer,
            operation={"responses": {}},
        )
    )
    server.add_socket(SocketRoute(name="Any.Socket", scope=SCOPE_ENV, path="/ws", handle=socket))
    async with (
        server,
        httpx.AsyncClient(base_url=f"http://{server.rest_address}", timeout=30) as http,
        connect(
            f"ws://{server.rest_address}/ws",
            additional_headers={"authorization": f"Bearer {MINE}"},
        ) as opened,
    ):
        assert await opened.recv()
        with ended_in_time(path):
            text = await rest_stream(http, "GET", "/events", path)
        assert "bearer token is missing or wrong" in text
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(opened.recv(), WITHIN_S + SLACK_S)


def test_the_streams_of_the_protos_are_all_here() -> None:
    assert {rpc.name for rpc in STREAMS} == {
        "Interact",
        "GenerateStream",
        "WatchInstances",
        "Watch",
        "WatchPolicy",
    }
    assert {rpc.name for rpc in UPLOADS} == {"LoadWeights"}
