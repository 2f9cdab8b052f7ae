"""Ask whether a server is ready, or alive: grpc.health.v1 for our services, PING for Redis."""

from __future__ import annotations

import asyncio

import grpc
from dialoop.clients.tls import open_channel
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0
_SILENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


async def is_serving(address: str) -> bool:
    """Ask the health service once."""
    # A new channel each time, since one that failed to connect waits in gRPC's own back-off.
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def answers(address: str, timeout_s: float) -> bool:
    """Ask the health service once, and take any answer.

    A server that says it does not serve is alive all the same.
    """
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _SILENT
        return True


async def answers_ping(host: str, port: int, password: str = "") -> bool:
    """Return whether Redis takes commands."""
    return (await _ping(host, port, _TIMEOUT_S, password)).startswith(b"+PONG")


async def answers_anything(host: str, port: int, timeout_s: float) -> bool:
    """Return whether Redis answers within the time; while it loads its file it says LOADING."""
    return bool(await _ping(host, port, timeout_s))


async def _ping(host: str, port: int, timeout_s: float, password: str = "") -> bytes:
    """Send one inline PING and return the answer; empty if none came."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if password:
                    writer.write(f"AUTH {password}\r\n".encode())
                    await reader.readline()
                writer.write(b"PING\r\n")
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
