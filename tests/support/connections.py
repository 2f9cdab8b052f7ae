"""TCP servers and connections of tests, closed before the event loop is.

A connection that outlives its loop is reported in a later test.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def serving_connections(serve):
    """Serve every connection with `serve(reader, writer)`; yield the server's host:port."""
    handlers = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


@asynccontextmanager
async def connection_to(port: int):
    """Connect to a port of this machine; yield reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def copy(reader, writer) -> None:
    """Copy bytes until either end closes, then close the writer."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
