"""Connections of the REST server: requests in a row, upgrades, limits, idle ones."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
import websockets
from dialoop_services.rest.app import RestServer
from dialoop_services.rest.connections import MAX_HEAD_BYTES, LimitedConnection, noting_requests
from dialoop_services.runtime.listening import ConnectionLimits, bound_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEEP_ALIVE_S = 0.3
REQUEST = b"POST /%s HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\nhi"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the path; /slow takes longer than an idle connection is kept."""
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * KEEP_ALIVE_S)
    body = scope["path"].encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_and_answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the path and the whole body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body")
    answer = b"%s %s" % (scope["path"].encode(), body)
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def serving(app: Any, limits: ConnectionLimits) -> AsyncIterator[int]:
    """Serve an application on a free port."""
    protocol: Any = partial(LimitedConnection, set(), limits)
    config = uvicorn.Config(
        noting_requests(app), http=protocol, lifespan="off", log_config=None, port=0
    )
    config.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        await server.shutdown()


@asynccontextmanager
async def connection(
    app: Any = echo,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an application, and connect to it."""
    async with serving(app, ConnectionLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


async def test_requests_that_come_together_are_answered_in_order() -> None:
    async with connection() as (reader, writer):
        writer.write(REQUEST % b"one" + REQUEST % b"two" + REQUEST % b"three")
        answers = [await read_answer(reader) for _ in range(3)]
    assert answers == [b"/one", b"/two", b"/three"]


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        pytest.param([REQUEST[:-2] % b"a", b"h", b"i"], b"/a hi", id="a body in parts"),
        pytest.param([REQUEST[:9] % b"a", REQUEST[9:]], b"/a hi", id="a head in parts"),
        pytest.param([REQUEST % b"a?b=c"], b"/a hi", id="a query"),
        pytest.param([REQUEST % b"a%20b"], b"/a b hi", id="an encoded path"),
        pytest.param([(REQUEST % b"a").replace(b"POST", b"PUT")], b"/a hi", id="a method"),
        pytest.param(
            [(REQUEST % b"a").replace(b"1.1\r\n", b"1.1\r\nconnection: close\r\n")],
            b"/a hi",
            id="the last one",
        ),
    ],
)
async def test_a_request_reaches_the_application_however_it_comes(
    parts: list[bytes], answer: bytes
) -> None:
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.05)
        assert await read_answer(reader) == answer


async def test_a_caller_that_waits_for_100_continue_gets_it() -> None:
    head, _, body = (REQUEST % b"a").partition(b"\r\n\r\n")
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert await read_answer(reader) == b"/a hi"


async def test_the_body_of_a_request_with_an_unknown_upgrade_is_no_other_request() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    inner = REQUEST % b"smuggled"
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(inner))
        await asyncio.sleep(0.05)
        writer.write(inner)
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answers.lower()


async def test_bytes_that_are_no_http_after_a_request_are_refused() -> None:
    chunked = b"POST /a HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        writer.write(chunked + b"2\r\nhi\r\n0\r\n\r\n")
        assert await read_answer(reader) == b"/a hi"
        writer.write(b"nonsense\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("begin", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"])
async def test_another_protocol_is_told_which_one_is_spoken_here(begin: bytes) -> None:
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        writer.write(begin)
        assert b"INVALID_HTTP" in await reader.read()


async def refuse_unread(scope: Any, receive: Any, send: Any) -> None:
    """Answer before the body has come."""
    await send(
        {"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def test_a_body_that_nobody_read_is_no_head_of_the_next_request() -> None:
    size = 3 * MAX_HEAD_BYTES
    head = b"POST /a HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % size
    async with asyncio.timeout(20), connection(refuse_unread) as (reader, writer):
        for _ in range(2):
            writer.write(head + b"a")
            assert await read_answer(reader) == b""
            for _ in range(size // MAX_HEAD_BYTES - 1):
                writer.write(b"a" * MAX_HEAD_BYTES)
                await asyncio.sleep(0.02)
            writer.write(b"a" * (MAX_HEAD_BYTES - 1))
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
        assert b" 431 " in await reader.readuntil(b"\r\n")


async def test_heads_that_come_together_are_counted_each_for_itself() -> None:
    long = b"x: %s\r\n" % (b"a" * (MAX_HEAD_BYTES // 2))
    head = (REQUEST % b"a").replace(b"content-length", long + b"content-length")
    async with asyncio.timeout(20), connection(read_and_answer) as (reader, writer):
        writer.write(head * 3)
        assert [await read_answer(reader) for _ in range(3)] == [b"/a hi"] * 3


async def test_a_connection_is_closed_when_it_was_idle_and_not_while_it_is_answered() -> None:
    async with asyncio.timeout(20), connection() as (reader, writer):
        for path in (b"one", b"slow", b"two"):
            writer.write(REQUEST % path)
            assert await read_answer(reader) == b"/" + path
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        await asyncio.sleep(KEEP_ALIVE_S / 2)
        writer.write(REQUEST % b"three")
        assert await read_answer(reader) == b"/three"
        assert await reader.read() == b""
        assert loop.time() - answered_at >= 1.5 * KEEP_ALIVE_S - 0.05


async def hang_up(scope: Any, receive: Any, send: Any) -> None:
    """Accept a WebSocket, and close it when the client has sent something."""
    await receive()
    await send({"type": "websocket.accept"})
    await receive()
    await send({"type": "websocket.close"})


async def test_a_websocket_takes_a_place_until_its_end() -> None:
    async with asyncio.timeout(20), serving(hang_up, ConnectionLimits(max_connections=1)) as port:
        for _ in range(2):
            async with websockets.connect(f"ws://127.0.0.1:{port}") as socket:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert b" 429 " in await reader.readline()
                writer.close()
                await socket.send("end")
                await socket.wait_closed()
            await asyncio.sleep(0.05)


async def test_a_door_that_does_not_open_leaves_no_socket() -> None:
    bound = bound_socket("127.0.0.1", 0)
    door = RestServer(echo, drain_s=1, tls={"ssl_certfile": "/no/such/file"})
    with pytest.raises(FileNotFoundError):
        await door.open(bound)
    assert bound.fileno() == -1
