"""uvicorn in the loop of the gRPC server: ready at once, drained with it, blind to signals."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    import socket

    from dialoop_services.rest.guard import App

_KEEP_ALIVE_S = 75


class RestDoor:
    """Serves an application from `open` until `close`."""

    def __init__(self, app: App, *, drain_s: float, max_socket_bytes: int = 0) -> None:
        """`max_socket_bytes`: of one WebSocket message; 0 where no WebSocket is served."""
        asgi: Any = app
        self._config = uvicorn.Config(
            asgi,
            lifespan="off",
            ws="websockets-sansio" if max_socket_bytes else "none",
            ws_max_size=max_socket_bytes,
            ws_per_message_deflate=False,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        # Not `serve`, which takes the signals: they belong to the service's StopSignal.
        self._server = uvicorn.Server(self._config)
        self._ticking: asyncio.Task[None] | None = None

    async def open(self, bound: socket.socket) -> None:
        """Serve on a bound socket, which is ours from now on."""
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[bound])
        self._ticking = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        """Take no more connections, answer what is in flight within the drain, then end."""
        self._server.should_exit = True
        if self._ticking is not None:
            await self._ticking
            await self._server.shutdown()
