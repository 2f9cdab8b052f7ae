"""Services in one process that call each other without a network.

network = InProcessNetwork()
server = network.server("environment")
server.add(add_EnvironmentServiceServicer_to_server, servicer, "dialoop.v1.EnvironmentService")
async with server, network.connect("environment") as channel:
    await EnvironmentClient(channel).list_environments()

A call runs the same methods that gRPC runs, wrapped the same way: statuses, reasons, tokens,
deadlines, size limits and cancellation are the same. Messages are copied by serializing them, so
that caller and servicer share nothing. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from dialoop.clients.channel import Channel
from dialoop.errors import InvalidConfig
from google.protobuf import descriptor_pool

from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import Calls
from dialoop_services.runtime.fleet import Incarnation
from dialoop_services.runtime.handlers import Handlers
from dialoop_services.runtime.in_process_call import ClientCall, InProcessCall, Wire, rpc_error
from dialoop_services.runtime.listening import address_of, bound_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from dialoop.clients.registry import ServiceMember
    from dialoop.clients.retry import RetryPolicy

    from dialoop_services.rest.app import RestDoor
    from dialoop_services.rest.http_routes import HttpRoute
    from dialoop_services.rest.socket_routes import SocketRoute

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_DRAIN_S = 10.0
HOST = "127.0.0.1"
"""Where REST doors of servers in a process listen."""


class InProcessNetwork:
    """The servers of this process by name."""

    def __init__(self, *, token: str = "", max_message_bytes: int = _MAX_MESSAGE_BYTES) -> None:
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._places: dict[str, Place] = {}

    def server(
        self, name: str, *, drain_s: float = _DRAIN_S, rest_port: int | None = None
    ) -> InProcessServer:
        """Return a server that listens at that name once it is entered.

        With `rest_port` it also has a REST door there, for programs that speak HTTP.
        """
        wire = Wire(self._max_message_bytes)
        server = InProcessServer(self._place(name), wire, token=self._token, drain_s=drain_s)
        server.rest_port = rest_port
        return server

    def connect(
        self,
        name: str,
        to: str | ServiceMember = "",
        *,
        retry: RetryPolicy | None = None,
        token: str | None = None,
    ) -> Channel:
        """Return a channel to the server of that name, which may start later or start again.

        With a member of the registry as `to`, to that life of it alone.
        """
        transport = InProcessTransport(self._place(name))
        token = self._token if token is None else token
        epoch = 0 if isinstance(to, str) else to.epoch
        return Channel(name, token=token, retry=retry, transport=transport, epoch=epoch)

    def transport(self, name: str) -> InProcessTransport:
        """Return the transport through which a generated stub calls a service."""
        return InProcessTransport(self._place(name))

    def _place(self, name: str) -> Place:
        return self._places.setdefault(name, Place(name))


class Place:
    """The place where the server of one name listens, if there is one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server: InProcessServer | None = None
        self.is_taken = asyncio.Event()


class InProcessServer:
    """Serves servicers to callers in this process, as GrpcServer serves them to other processes."""

    def __init__(self, place: Place, wire: Wire, *, token: str, drain_s: float) -> None:
        self._place = place
        self._wire = wire
        self.rest_port: int | None = None
        self._token = token
        self.incarnation = Incarnation()
        self._handlers = Handlers(
            Calls(), Token(token), door="in_process", incarnation=self.incarnation
        )
        self._drain_s = drain_s
        self._servicers: list[Any] = []
        self._routes: list[HttpRoute] = []
        self._door: RestDoor | None = None
        self._services: list[str] = []
        self._serving: dict[str, bool] = {}
        self._stopping = asyncio.Event()

    def add(self, register: Callable[[Any, Any], None], servicer: Any, service: str) -> None:
        """Serve `servicer`, given its generated `add_..._to_server` and full service name."""
        register(servicer, self._handlers)
        self._services.append(service)
        self._servicers.append(servicer)

    def add_route(self, route: HttpRoute) -> None:
        """Serve one more route where there is a REST door."""
        self._routes.append(route)

    def add_socket(self, route: SocketRoute) -> None:
        """Do nothing: a REST door in a process has no WebSockets."""

    def show(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
        *,
        is_gauge: bool = False,
    ) -> None:
        """Do nothing: metrics are at the REST door."""

    def describe(self, name: str, facts: Mapping[str, str]) -> None:
        """Do nothing: /readyz is at the REST door."""

    @property
    def serving(self) -> dict[str, bool]:
        """Return for each service name whether it reports itself as serving."""
        return dict(self._serving)

    @property
    def address(self) -> str:
        """Return the name that other services connect to."""
        return self._place.name

    @property
    def rest_address(self) -> str:
        """Return host:port of the REST door; empty when there is none."""
        return "" if self.rest_port is None else address_of(HOST, self.rest_port)

    @property
    def stopping(self) -> asyncio.Event:
        """Return the event that `stop` sets, for workers that run beside the server."""
        return self._stopping

    def stop(self) -> None:
        """Tell the service to stop."""
        self._stopping.set()

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Report one service, or all, as serving or not."""
        for name in self._services if service is None else [service]:
            self._serving[name] = serving

    async def wait_until_stopped(self) -> None:
        """Wait for `stop()`."""
        await self._stopping.wait()

    def call(self, path: str, call: ClientCall) -> InProcessCall:
        """Begin a call of the rpc at `/dialoop.v1.EnvironmentService/Step`."""
        handler = self._handlers.find(path)
        if handler is None:
            raise rpc_error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return self._wire.begin(handler, call)

    async def __aenter__(self) -> Self:
        if self._place.is_taken.is_set():
            raise InvalidConfig(
                f"Two servers are named '{self._place.name}'.", remedy="Name them apart."
            )
        if self.rest_port is not None:
            self._door = self._rest_door()
            await self._door.open(bound_socket(HOST, self.rest_port))
        self._place.server = self
        self._place.is_taken.set()
        await self.set_serving(True)
        return self

    def _rest_door(self) -> RestDoor:
        # Imported here, since most processes need no REST.
        from dialoop_extras.rest.old_requests import OldRequests

        from dialoop_services.rest.app import RestDoor, RestOptions, rest_app
        from dialoop_services.rest.requests import BodyLimits
        from dialoop_services.runtime.metrics import Metrics

        metrics = Metrics()
        options = RestOptions(
            token=Token(self._token),
            bodies=BodyLimits(max_bytes=_MAX_MESSAGE_BYTES),
            calls=Calls(metrics),
            metrics=metrics,
            serving=lambda: self.serving,
            http_routes=tuple(self._routes),
            middleware=OldRequests(),
        )
        pool = descriptor_pool.Default()
        described = [pool.FindServiceByName(name) for name in self._services]
        servicers = list(zip(self._servicers, described, strict=True))
        return RestDoor(rest_app(servicers, options), drain_s=self._drain_s)

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        self._place.server = None
        self._place.is_taken.clear()
        await self.set_serving(False)
        if self._door is not None:
            await self._door.close()
        await self._wire.drain(self._drain_s)


class InProcessTransport:
    """Carries the calls of a Channel or a generated stub in place of a grpc.aio.Channel."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._calls: set[InProcessCall] = set()
        self._is_closed = False

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., InProcessCall]:
        """Return a function that begins calls of the rpc at `path`."""

        def begin(
            request: Any, *, timeout: float | None = None, metadata: Any = ()
        ) -> InProcessCall:
            call = ClientCall(
                request=request,
                serialize=request_serializer,
                deserialize=response_deserializer,
                timeout_s=timeout,
                metadata=tuple(metadata or ()),
            )
            return self._begin(path, call)

        return begin

    unary_stream = stream_unary = stream_stream = unary_unary

    async def channel_ready(self) -> None:
        """Wait until a server listens at the place."""
        await self._place.is_taken.wait()

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls in flight and refuse later ones."""
        self._is_closed = True
        for call in tuple(self._calls):
            call.cancel()

    def _begin(self, path: str, client_call: ClientCall) -> InProcessCall:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if self._place.server is None:
            raise rpc_error(
                grpc.StatusCode.UNAVAILABLE,
                f"No server named '{self._place.name}' runs in this process.",
            )
        call = self._place.server.call(path, client_call)
        self._calls.add(call)
        call.on_end(self._calls.discard)
        return call
