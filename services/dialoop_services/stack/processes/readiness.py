"""Ask whether a server is ready: grpc.health.v1 for our services, PING for Redis."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_TIMEOUT_S = 2.0


def grpc_ready(address: str) -> Callable[[], Awaitable[bool]]:
    """Return a probe that tells whether the server at `address` reports itself as serving."""
    return partial(is_serving, address)


async def is_serving(address: str) -> bool:
    """Ask the health service once."""
    # A new channel each time, since one that failed to connect waits in gRPC's own back-off.
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def redis_ready(host: str, port: int) -> Callable[[], Awaitable[bool]]:
    """Return a probe that tells whether Redis answers; while it loads its file it says LOADING."""
    return partial(answers_ping, host, port)


async def answers_ping(host: str, port: int) -> bool:
    """Send one inline PING."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
