"""Connections of the REST door: writes that are joined, requests in a row, idle ones."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from dialoop_services.rest.app import RestDoor
from dialoop_services.rest.connections import LimitedConnection, _JoinedWrites
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
async def connection(
    app: Any = echo,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an application on a free port, and connect to it."""
    protocol: Any = partial(LimitedConnection, ConnectionLimits())
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, port=0)
    config.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.shutdown()


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
        assert b"INVALID_HTTP" in await reader.read()


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


class _Transport:
    def __init__(self) -> None:
        self.writes: list[tuple[bytes, ...]] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append((data,))

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.writes.append(parts)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def raw() -> _Transport:
    return _Transport()


def joined_over(raw: _Transport) -> _JoinedWrites:
    transport: Any = raw
    return _JoinedWrites(transport, asyncio.get_running_loop())


async def test_head_and_body_leave_in_one_write_and_a_lone_part_soon(raw: _Transport) -> None:
    joined = joined_over(raw)
    joined.write(b"head")
    assert raw.writes == []
    joined.write(b"body")
    joined.write(b"next")
    assert raw.writes == [(b"head", b"body")]
    await asyncio.sleep(0)
    assert raw.writes == [(b"head", b"body"), (b"next",)]
    await asyncio.sleep(0)
    assert len(raw.writes) == 2


async def test_closing_writes_what_is_held_and_a_lost_connection_gets_nothing(raw) -> None:
    joined = joined_over(raw)
    joined.write(b"head")
    joined.close()
    assert (raw.writes, raw.is_closed) == ([(b"head",)], True)
    joined.write(b"head")
    joined.write(b"body")
    joined.write(b"more")
    await asyncio.sleep(0)
    assert raw.writes == [(b"head",)]


async def test_a_door_that_does_not_open_leaves_no_socket() -> None:
    bound = bound_socket("127.0.0.1", 0)
    door = RestDoor(echo, drain_s=1, tls={"ssl_certfile": "/no/such/file"})
    with pytest.raises(FileNotFoundError):
        await door.open(bound)
    assert bound.fileno() == -1
