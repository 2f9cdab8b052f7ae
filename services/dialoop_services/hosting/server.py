"""The server of a service: gRPC and, on `rest_port`, REST, with health, tokens and a drain.

server = GrpcServer(settings)
server.add(add_EnvironmentServiceServicer_to_server, servicer, "dialoop.v1.EnvironmentService")
async with server:                      # listens; server.port is the bound port
    await server.wait_until_stopped()   # SIGTERM, SIGINT or server.stop()
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import grpc
from dialoop.errors import InvalidConfig
from dialoop.extras import offered
from dialoop.reasons import Reason
from dialoop.waits import current_waits
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.access.server_tls import ServerTls
from dialoop_services.runtime.access.token_file import TokenFile
from dialoop_services.runtime.calls import CallLimits, Calls
from dialoop_services.runtime.fleet import Incarnation
from dialoop_services.runtime.handlers import Handlers, NoSuchMethod
from dialoop_services.runtime.listening import (
    ConnectionLimits,
    address_of,
    bound_socket,
    require_free_path,
    require_safe_address,
)
from dialoop_services.runtime.logs import log_stalls
from dialoop_services.runtime.process import tune_memory
from dialoop_services.runtime.shutdown import StopSignal, owns_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop_services.rest.app import RestServer
    from dialoop_services.rest.http_routes import HttpRoute
    from dialoop_services.rest.middleware import Middleware
    from dialoop_services.rest.socket_routes import SocketRoute
    from dialoop_services.runtime.access.tickets import TicketCheck
    from dialoop_services.runtime.metrics import Metrics
    from dialoop_services.runtime.settings import ServerSettings

log = logging.getLogger(__name__)

_IDLE_MS = 600_000
_MAX_WAITING_CALLS = 1 << 14
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"  # the same messages as v1alpha's


class GrpcServer:
    """Serves servicers from entering the context until leaving it, then drains.

    With `unix_path` it listens at that socket in place of host and port, for callers of its own
    process, and leaves the signals of the process alone.
    """

    def __init__(self, settings: ServerSettings, *, unix_path: str = "") -> None:
        require_safe_address(settings)
        self._unix_path = unix_path
        self._tls = ServerTls(settings)
        self._settings = settings
        self._registrations: list[tuple[Callable[[Any, Any], None], Any]] = []
        self._services: list[str] = []
        self._routes: list[HttpRoute] = []
        self._sockets: list[SocketRoute] = []
        self._shown: list[tuple[str, str, str, Callable[[], Mapping[str, float]], bool]] = []
        self._health = health.aio.HealthServicer()
        self._serving: dict[str, bool] = {}
        self._details: dict[str, dict[str, str]] = {}
        self._stop = StopSignal(of_process=not unix_path)
        self.incarnation = Incarnation()
        self.port = 0
        """The bound port; 0 until the server listens."""
        self._rest_port: int | None = None
        self._exits = AsyncExitStack()

    def add(self, register: Callable[[Any, Any], None], servicer: Any, service: str) -> None:
        """Serve `servicer`, given its generated `add_..._to_server` and full service name."""
        self._registrations.append((register, servicer))
        self._services.append(service)

    def add_route(self, route: HttpRoute) -> None:
        """Serve one more route at the REST server."""
        self._routes.append(route)

    def add_socket(self, route: SocketRoute) -> None:
        """Serve one more WebSocket at the REST server; InvalidConfig (PACKAGE_MISSING)."""
        from dialoop_services.rest.socket_routes import require_sockets

        require_sockets()
        self._sockets.append(route)

    def show(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
        *,
        is_gauge: bool = False,
    ) -> None:
        """Show counts by the values of a label among the metrics; a gauge's values may fall."""
        self._shown.append((name, text, label, read, is_gauge))

    def describe(self, name: str, facts: Mapping[str, str]) -> None:
        """Show facts of a part of the service, such as `environments/python`, in /readyz."""
        self._details[name] = dict(facts)

    @property
    def address(self) -> str:
        """Return `host:port`, or `unix:path`, to connect to."""
        if self._unix_path:
            return f"unix:{self._unix_path}"
        return address_of(self._settings.host, self.port)

    @property
    def rest_address(self) -> str:
        """Return `host:port` of the REST server; empty when there is none."""
        return "" if self._rest_port is None else address_of(self._settings.host, self._rest_port)

    @property
    def stopping(self) -> asyncio.Event:
        """Return the event that a stop sets, for workers that run beside the server."""
        return self._stop.event

    def stop(self) -> None:
        """Tell the service to stop, as SIGTERM does."""
        self._stop.event.set()

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Report one service, or all and the server itself, as serving or not."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for name in [service] if service is not None else ["", *self._services]:
            self._serving[name] = serving
            await self._health.set(name, status)

    async def wait_until_stopped(self) -> None:
        """Wait for SIGTERM, SIGINT or `stop()`."""
        await self._stop.wait()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        """Listen, serve, and say so; what is opened is put into `_exits`."""
        await self._exits.enter_async_context(self._stop)
        metrics = self._metrics()
        calls = Calls(metrics)
        grpc_server = self._grpc_server(calls)
        rest_server, bound = None, None
        if metrics is not None:
            rest_server = self._rest_server(calls, metrics)
            bound = bound_socket(self._settings.host, self._settings.rest_port or 0)
            self._exits.callback(bound.close)  # which its server does too, once it is open
        self.port = self._listen(grpc_server)
        self._exits.push_async_callback(self._drain, grpc_server, rest_server)
        await grpc_server.start()
        if rest_server is not None and bound is not None:
            self._rest_port = bound.getsockname()[1]
            await rest_server.open(bound)
        if not self._unix_path:  # the services of one process have their waits in common
            stalls = asyncio.create_task(log_stalls(current_waits.get()))
            self._exits.callback(stalls.cancel)
        await self.set_serving(True)
        if owns_process.get():
            tune_memory()
        where = {"rest_address": self.rest_address} if rest_server else {}
        log.info("Serving.", extra={**where, "address": self.address})

    async def __aexit__(self, *_: object) -> None:
        self._stop.event.set()
        await self._exits.aclose()

    def _listen(self, server: grpc.aio.Server) -> int:
        if self._unix_path:
            require_free_path(self._unix_path)
            server.add_insecure_port(self.address)
            return 0
        host, port = self._settings.host, self._settings.port
        # Try the port before gRPC does, because gRPC would write an error of its own to stderr.
        bound_socket(host, port).close()
        address, credentials = address_of(host, port), self._tls.grpc_credentials()
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InvalidConfig(
                f"Cannot listen on {address}.",
                reason=Reason.CANNOT_LISTEN,
                remedy="Choose another.",
            ) from error

    def _metrics(self) -> Metrics | None:
        """Return the metrics of the REST server; without the server they are not even imported."""
        if self._settings.rest_port is None:
            return None
        from dialoop_services.runtime.metrics import LabelledCounts, Metrics

        metrics = Metrics()
        metrics.show_waits(current_waits.get())
        for shown in self._shown:
            metrics.show(LabelledCounts(*shown))
        return metrics

    def _rest_server(self, calls: Calls, metrics: Metrics) -> RestServer:
        from dialoop_services.rest.app import RestOptions, RestServer, rest_app
        from dialoop_services.rest.requests import BodyLimits

        pool = descriptor_pool.Default()
        servicers = [
            (servicer, pool.FindServiceByName(name))
            for (_, servicer), name in zip(self._registrations, self._services, strict=True)
        ]
        options = RestOptions(
            token=self._token(),
            bodies=BodyLimits(
                self._call_limits(),
                max_pending_bytes=self._settings.max_pending_bytes,
                time_s=self._settings.request_body_s,
            ),
            calls=calls,
            metrics=metrics,
            serving=lambda: dict(self._serving),
            details=lambda: dict(self._details),
            http_routes=tuple(self._routes),
            middleware=_middleware(),
            socket_routes=tuple(self._sockets),
        )
        size = self._settings.max_message_bytes if self._sockets else 0
        app = rest_app(servicers, options)
        return RestServer(
            app,
            drain_s=self._settings.drain_s,
            max_socket_bytes=size,
            limits=self._connection_limits(),
            tls=self._tls.uvicorn_options(),
        )

    def _connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            max_connections=self._settings.max_connections,
            head_s=self._settings.request_head_s,
        )

    def _call_limits(self) -> CallLimits:
        return CallLimits(
            max_calls=self._settings.max_calls,
            max_bytes=self._settings.max_message_bytes,
            max_large_bytes=self._settings.max_answer_bytes,
        )

    def _token(self) -> Token:
        settings = self._settings
        return Token(
            settings.token.get_secret_value(),
            settings.admin_token.get_secret_value(),
            TokenFile(settings.token_file) if settings.token_file else None,
            self._ticket_check(),
        )

    def _ticket_check(self) -> TicketCheck | None:
        """Return what checks tickets; None where nothing says by whose key they are signed."""
        settings = self._settings
        text, token = settings.ticket.get_secret_value(), settings.token.get_secret_value()
        if not text and not token:
            return None
        from dialoop_services.runtime.access.tickets import Authority, Ticket, TicketCheck

        authority = Authority.of(token, settings.admin_token.get_secret_value())
        if text:
            public_key = Ticket.of(text).job_key
        elif authority is not None:
            public_key = authority.public_key
        else:
            return None
        return TicketCheck(
            public_key,
            run=settings.of_run,
            role=settings.ROLE,
            audience=lambda: self.incarnation.audience,
        )

    async def _drain(self, grpc_server: grpc.aio.Server, rest_server: RestServer | None) -> None:
        """Let calls in flight end, at both servers at the same time."""
        self._serving = dict.fromkeys(self._serving, False)
        await self._health.enter_graceful_shutdown()
        async with asyncio.TaskGroup() as ending:
            ending.create_task(grpc_server.stop(self._settings.drain_s))
            if rest_server is not None:
                ending.create_task(rest_server.close())

    def _grpc_server(self, calls: Calls) -> grpc.aio.Server:
        handlers = Handlers(
            calls, self._token(), limits=self._call_limits(), incarnation=self.incarnation
        )
        for register, servicer in self._registrations:
            register(servicer, handlers)
        reflected = reflection.aio.ReflectionServicer(
            [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, handlers)
        handlers.also_as(reflection.SERVICE_NAME, _REFLECTION_V1)
        # Health needs no token: whoever has none gets the server's state, whatever they ask.
        health_check = {f"/{health.SERVICE_NAME}/Check": self._own_health}
        of_health = Handlers(calls, self._token(), limits=self._call_limits(), unread=health_check)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, of_health)
        options = self._grpc_options(handlers.max_bytes)
        return grpc.aio.server(handlers=[handlers, of_health, NoSuchMethod()], options=options)

    async def _own_health(self, _: Any, context: Any) -> health_pb2.HealthCheckResponse:
        answer: health_pb2.HealthCheckResponse = await self._health.Check(
            health_pb2.HealthCheckRequest(), context
        )
        return answer

    def _grpc_options(self, max_bytes: int) -> list[tuple[str, int]]:
        settings = self._settings
        connections = self._connection_limits().within_descriptors()
        unread_ms = round(1000 * settings.unread_s)
        return [
            ("grpc.so_reuseport", 0),  # else two services could share a port unnoticed
            ("grpc.max_send_message_length", settings.max_answer_bytes),
            ("grpc.max_receive_message_length", max_bytes),
            # Allow clients to ping idle connections, so that they notice a dead server.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            # And notice clients that are gone, or leave their answers unread.
            ("grpc.keepalive_time_ms", unread_ms // 2),
            ("grpc.keepalive_timeout_ms", unread_ms // 2),
            ("grpc.http2.ping_timeout_ms", unread_ms // 2),
            ("grpc.max_concurrent_streams", settings.max_connection_calls),
            # gRPC drops calls by chance, whosever they are, where more than so many wait for us.
            ("grpc.server.max_pending_requests", _MAX_WAITING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_WAITING_CALLS),
            ("grpc.max_allowed_incoming_connections", connections.max_connections),
            ("grpc.server_handshake_timeout_ms", round(1000 * connections.head_s)),
            # A client that has no call connects again when it needs to.
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        ]


def _middleware() -> Middleware | None:
    """Return what an extra reads bodies with; InvalidConfig where two of them would."""
    kinds = offered("rest_middleware")
    if len(kinds) > 1:
        names = " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise InvalidConfig(
            f"{names} all want to read the bodies of REST.", remedy="Uninstall all but one of them."
        )
    return kinds[0]() if kinds else None
