"""Relay TCP connections to services in a network that publishes no ports.

A container on a network without egress cannot publish ports. A container on both networks can, if
it runs `python -m dialoop_services.runtime.relay 0.0.0.0:7001=environment:7001`. It connects to the
named targets only, so nothing gets out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop_services.runtime.process import run
from dialoop_services.runtime.shutdown import StopSignal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """An address to listen on, and the target that its connections go to."""

    host: str
    port: int
    target_host: str
    target_port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `127.0.0.1:7001=environment:7001`; raise ValueError for any other form."""
        outer, _, inner = text.partition("=")
        (host, port), (target_host, target_port) = _split(outer), _split(inner)
        return cls(host=host, port=port, target_host=target_host, target_port=target_port)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


async def listen(passage: Passage) -> asyncio.Server:
    """Accept connections and relay them until the returned server is closed."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                inner = await asyncio.open_connection(passage.target_host, passage.target_port)
        except (OSError, TimeoutError) as error:
            # The caller sees a closed connection, as if no service were there.
            log.warning("The target does not answer.", extra={"error": type(error).__name__})
            writer.close()
            return
        await asyncio.gather(_pour(reader, inner[1]), _pour(inner[0], writer))

    return await asyncio.start_server(relay, passage.host, passage.port)


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes one way until either end closes; drain() slows a fast sender down."""
    with contextlib.suppress(OSError):
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.close()


async def serve(passages: Sequence[Passage]) -> None:
    """Listen on every passage until the process gets a stop signal."""
    async with contextlib.AsyncExitStack() as exits:
        stop = await exits.enter_async_context(StopSignal())
        for passage in passages:
            server = await listen(passage)
            exits.callback(server.close)
            log.info("Relaying.", extra={"port": passage.port, "to": passage.target_host})
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, which takes one LISTEN=TARGET for each port."""
    parser = argparse.ArgumentParser(description="Relay TCP connections.")
    parser.add_argument("passages", nargs="+", type=Passage.parse, metavar="HOST:PORT=HOST:PORT")
    options = parser.parse_args(arguments)
    run(lambda: serve(options.passages), name="relay")


if __name__ == "__main__":
    main()
