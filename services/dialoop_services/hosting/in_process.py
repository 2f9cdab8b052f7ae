"""Services in one process that call each other over unix sockets.

network = InProcessNetwork()
server = network.server("environment")
server.add(add_EnvironmentServiceServicer_to_server, servicer, "dialoop.v1.EnvironmentService")
async with server, network.connect("environment") as channel:
    await EnvironmentClient(channel).list_environments()
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from typing import TYPE_CHECKING

from dialoop.clients.channel import Channel
from pydantic import SecretStr

from dialoop_services.hosting.server import GrpcServer
from dialoop_services.runtime.settings import ServerSettings

if TYPE_CHECKING:
    from dialoop.clients.registry import ServiceInstance
    from dialoop.clients.retry import RetryPolicy

# The path of a socket has at most 107 bytes, of which names take up to 30.
_MAX_FOLDER = 60


class InProcessNetwork:
    """The servers of this process by name, at sockets that only its own user can open."""

    def __init__(self, *, token: str = "", max_message_bytes: int = 64 * 1024 * 1024) -> None:
        self._token = token
        self._max_message_bytes = max_message_bytes
        is_short = len(tempfile.gettempdir()) <= _MAX_FOLDER
        self._folder = tempfile.mkdtemp(prefix="dialoop-", dir=None if is_short else "/tmp")
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    def server(
        self, name: str, *, drain_s: float = 10.0, rest_port: int | None = None
    ) -> GrpcServer:
        """Return a server that listens at that name once it is entered.

        With `rest_port` it also has a REST server there, for programs that speak HTTP.
        """
        # Of the arguments alone: the variables are meant for services that have a process each.
        settings = ServerSettings.model_construct(
            token=SecretStr(self._token),
            max_message_bytes=self._max_message_bytes,
            max_large_message_bytes=self._max_message_bytes,
            drain_s=drain_s,
            rest_port=rest_port,
        )
        return GrpcServer(settings, unix_path=f"{self._folder}/{name}")

    def connect(
        self,
        address: str,
        to: str | ServiceInstance = "",
        *,
        retry: RetryPolicy | None = None,
        token: str | None = None,
    ) -> Channel:
        """Return a channel to the server of that name, which may start later or start again.

        With an instance of the registry as `to`, to that life of it alone.
        """
        return Channel(
            self.address(address),
            token=self._token if token is None else token,
            max_message_bytes=self._max_message_bytes,
            retry=retry,
            epoch=0 if isinstance(to, str) else to.epoch,
        )

    def address(self, name: str) -> str:
        """Return the address of the server of that name; an address as it is."""
        return name if name.startswith("unix:") else f"unix:{self._folder}/{name}"
