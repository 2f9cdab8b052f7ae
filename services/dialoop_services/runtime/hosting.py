"""What a service gets from its host: a server, and channels to other services.

The same service runs in a process of its own (GrpcServer, channels to host:port) or in one process
with all others (InProcessServer, channels to names).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dialoop.clients.channel import Channel

from dialoop_services.runtime.server import GrpcServer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from typing import Self

    from dialoop.clients.retry import RetryPolicy

    from dialoop_services.rest.http_routes import HttpRoute
    from dialoop_services.rest.socket_routes import SocketRoute
    from dialoop_services.runtime.fleet import Incarnation
    from dialoop_services.runtime.settings import ServerSettings


class Server(Protocol):
    """Serves servicers from entering its context until leaving it, then drains."""

    @property
    def address(self) -> str:
        """Return the address that other services connect to."""

    @property
    def rest_address(self) -> str:
        """Return host:port of the REST door; empty where there is none."""

    @property
    def incarnation(self) -> Incarnation:
        """Return which member of the registry the service is."""

    @property
    def stopping(self) -> asyncio.Event:
        """Return the event that `stop` sets."""

    def add(self, register: Callable[[Any, Any], None], servicer: Any, service: str) -> None:
        """Serve `servicer`, given its generated `add_..._to_server` and full service name."""

    def add_route(self, route: HttpRoute) -> None:
        """Serve one more route where there is a REST door."""

    def add_socket(self, route: SocketRoute) -> None:
        """Serve one more WebSocket where there is a REST door."""

    def show(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
        *,
        is_gauge: bool = False,
    ) -> None:
        """Show counts by the values of a label among the service's metrics, where it has some."""

    def describe(self, name: str, facts: Mapping[str, str]) -> None:
        """Show facts of a part of the service in /readyz, where there is a REST door."""

    def stop(self) -> None:
        """Tell the service to stop."""

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Report one service, or all, as serving or not."""

    async def wait_until_stopped(self) -> None:
        """Wait until `stop` or a signal stops the service."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Connect(Protocol):
    """Makes channels to other services."""

    def __call__(
        self, address: str, *, retry: RetryPolicy | None = None, epoch: int = 0
    ) -> Channel:
        """Return a channel that the caller closes; with an epoch, to that member alone."""


class Host(Protocol):
    """The surroundings of a service: its server, and the way to other services."""

    @property
    def server(self) -> Server:
        """Return the service's server, which is not entered yet."""

    @property
    def connect(self) -> Connect:
        """Return the function that makes channels to other services."""


class OwnProcess:
    """Hosts one service that has this process to itself."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.server: Server = GrpcServer(settings)
        self.connect: Connect = self._connect

    def _connect(
        self, address: str, *, retry: RetryPolicy | None = None, epoch: int = 0
    ) -> Channel:
        return Channel(
            address,
            token=self._settings.token.get_secret_value(),
            max_message_bytes=self._settings.max_message_bytes,
            retry=retry,
            epoch=epoch,
        )
