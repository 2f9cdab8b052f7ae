"""The door between the containers' networks: what it relays, and what it does without a target."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.runtime.probe import main

from tests.support.connections import connection_to, serving_connections

DOOR = Path(__file__).parents[3] / "infra" / "docker" / "door.sh"
NAME = "dialoop.v1.EnvironmentService"
pytestmark = pytest.mark.skipif(shutil.which("socat") is None, reason="needs socat")


@asynccontextmanager
async def door(*ways: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The relays, once all listen; all have ended when this is left."""
    running = await asyncio.create_subprocess_exec(DOOR, *ways, start_new_session=True)
    try:
        for way in ways:
            while True:
                with suppress(OSError):
                    async with connection_to(int(way.partition("=")[0])):
                        break
                await asyncio.sleep(0.02)
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        await running.wait()


def serving() -> GrpcServer:
    server = GrpcServer(load(ServerSettings, token="secret", rest_port=0))
    servicer = stubs.EnvironmentServiceServicer()
    server.add(stubs.add_EnvironmentServiceServicer_to_server, servicer, NAME)
    return server


async def exit_code(port: int) -> int:
    return await asyncio.to_thread(main, [f"127.0.0.1:{port}"])


async def test_grpc_and_a_probe_pass_the_door(unused_tcp_port_factory) -> None:
    first, second = unused_tcp_port_factory(), unused_tcp_port_factory()
    async with serving() as server:
        ways = (f"{first}={server.address}", f"{second}={server.rest_address}")
        async with door(*ways):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{first}") as channel:
                call = stubs.EnvironmentServiceStub(channel).ListEnvironments
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(b"")
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await exit_code(second) == 0
    async with door(ways[1]):  # it stays, and says that nobody is there
        assert await exit_code(second) == 1


async def test_a_door_without_a_target_closes_the_connection(unused_tcp_port: int) -> None:
    way = f"{unused_tcp_port}=127.0.0.1:1"
    async with door(way), connection_to(unused_tcp_port) as (reader, _):
        assert await reader.read() == b""


async def test_a_door_passes_large_answers_on_whole(unused_tcp_port: int) -> None:
    answer = bytes(range(256)) * 40_000

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # what looks whether the door listens
            await reader.readexactly(4)
            writer.write(answer)
            await writer.drain()

    async with (
        serving_connections(answering) as target,
        door(f"{unused_tcp_port}={target}"),
        connection_to(unused_tcp_port) as (reader, writer),
    ):
        writer.write(b"ping")
        assert await reader.read() == answer


async def test_a_relay_that_ends_ends_the_door_so_that_it_starts_again(
    unused_tcp_port_factory,
) -> None:
    port = unused_tcp_port_factory()
    async with serving_connections(lambda *_: asyncio.sleep(0)) as taken:
        same = int(taken.rpartition(":")[2])
        async with door(f"{port}=127.0.0.1:1", f"{same}=127.0.0.1:1") as running:
            assert await asyncio.wait_for(running.wait(), 10) == 1


async def test_the_door_ends_when_it_is_told_to(unused_tcp_port: int) -> None:
    async with door(f"{unused_tcp_port}=127.0.0.1:1") as running:
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 5) != 0
