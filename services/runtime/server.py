"""One gRPC server per service: health, reflection, errors, tokens, and a drained end.

server = GrpcServer(settings)
server.add(add_EnvironmentServiceServicer_to_server, servicer, "dialoop.v1.EnvironmentService")
async with server:                      # listens; server.port is the bound port
    await server.wait_until_stopped()   # SIGTERM, SIGINT or server.stop()
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc
from dialoop.errors import InvalidConfig
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.runtime.auth import TokenInterceptor
from services.runtime.errors import ErrorInterceptor
from services.runtime.shutdown import StopSignal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from services.runtime.settings import ServerSettings

log = logging.getLogger(__name__)


class GrpcServer:
    """Serves servicers from entering the context until leaving it, then drains."""

    def __init__(self, settings: ServerSettings) -> None:
        _require_safe_address(settings)
        self._settings = settings
        self._registrations: list[tuple[Callable[[Any, Any], None], Any]] = []
        self._services: list[str] = []
        self._health = health.aio.HealthServicer()
        self._stop = StopSignal()
        self._port = 0
        self._exits = AsyncExitStack()

    def add(self, register: Callable[[Any, Any], None], servicer: Any, service: str) -> None:
        """Serve `servicer`, given its generated `add_..._to_server` and full service name."""
        self._registrations.append((register, servicer))
        self._services.append(service)

    @property
    def port(self) -> int:
        """The bound port; 0 until the server listens."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port` to connect to."""
        return _address(self._settings.host, self._port)

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the service was told to stop; for workers that run beside the server."""
        return self._stop.event

    def stop(self) -> None:
        """Tell the service to stop, as SIGTERM does."""
        self._stop.event.set()

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Report one service, or all and the server itself, as serving or not."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for name in [service] if service is not None else ["", *self._services]:
            await self._health.set(name, status)

    async def wait_until_stopped(self) -> None:
        """Wait for SIGTERM, SIGINT or `stop()`."""
        await self._stop.wait()

    async def __aenter__(self) -> Self:
        server = self._build()
        self._port = _bind(server, self._settings.host, self._settings.port)
        await self._exits.enter_async_context(self._stop)
        await server.start()
        self._exits.push_async_callback(server.stop, self._settings.drain_s)
        self._exits.push_async_callback(self._health.enter_graceful_shutdown)
        await self.set_serving(True)
        log.info("Serving.", extra={"address": self.address})
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.event.set()
        await self._exits.aclose()

    def _build(self) -> grpc.aio.Server:
        token = self._settings.token.get_secret_value()
        size = self._settings.max_message_bytes
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *([TokenInterceptor(token)] if token else [])],
            options=[
                ("grpc.so_reuseport", 0),  # else two services would share a port unnoticed
                ("grpc.max_send_message_length", size),
                ("grpc.max_receive_message_length", size),
                # Clients ping idle connections to notice a dead server; allow it.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ],
        )
        for register, servicer in self._registrations:
            register(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        return server


def _require_safe_address(settings: ServerSettings) -> None:
    if settings.token.get_secret_value() or _is_loopback(settings.host):
        return
    raise InvalidConfig(
        f"Listening on {settings.host} without a token would let anyone on the network in.",
        reason="TOKEN_REQUIRED",
        remedy="Set DIALOOP_TOKEN, or listen on 127.0.0.1.",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = _address(host, port)
    _require_free(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidConfig(
            f"Cannot listen on {address}.", reason="CANNOT_LISTEN", remedy="Choose another."
        ) from error


def _require_free(host: str, port: int) -> None:
    """Try the port before gRPC does: it would write its own complaint to stderr."""
    try:
        kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise InvalidConfig(
            f"Port {port} on {host} is taken."
            if taken
            else f"Cannot listen on {_address(host, port)}: {error.strerror}.",
            reason="PORT_TAKEN" if taken else "CANNOT_LISTEN",
            remedy="Choose another port, or 0 for any free one." if taken else "Change host.",
        ) from error
