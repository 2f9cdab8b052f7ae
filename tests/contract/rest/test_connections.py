"""Connections of the REST door: writes that are joined, requests in a row, idle ones."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from dialoop_services.rest.connections import LimitedConnection, _JoinedWrites
from dialoop_services.runtime.listening import ConnectionLimits

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


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve `echo` on a free port, and connect to it."""
    protocol: Any = partial(LimitedConnection, ConnectionLimits())
    config = uvicorn.Config(echo, http=protocol, lifespan="off", log_config=None, port=0)
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
