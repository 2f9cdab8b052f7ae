"""WebSockets of other protocols at the REST server. They share its guard and limits.

    async def echo(socket: Socket) -> None:
        while (text := await socket.receive()) is not None:
            await socket.send({"heard": text})

    server.add_socket(
        SocketRoute(name="Echo.Socket", scope=SCOPE_ENV, path="/echo/{name}", handle=echo)
    )

A text frame may be as large as a body (`max_message_bytes`); a larger one ends the connection. An
error that a handler raises ends it too, and goes to the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic_core
from dialoop.errors import DialoopError, InvalidConfig, PermissionDenied
from dialoop.reasons import Reason

from dialoop_services.rest.guard import POLICY_VIOLATION, authorization_of, bearer_of
from dialoop_services.runtime.calls import Calls, while_allowed
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from dialoop.v1.scope_pb2 import Scope as TokenScope

    from dialoop_services.rest.guard import Receive, Scope, Send
    from dialoop_services.runtime.access.auth import Token

log = logging.getLogger(__name__)

# Close codes of WebSockets: normal closure, internal error.
_NORMAL, _INTERNAL = 1000, 1011


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketRoute:
    """One route. Metrics and logs call it by its `name`; its path has parameters in braces.

    scope: what a token needs.
    """

    name: str
    scope: TokenScope
    path: str
    handle: Callable[[Socket], Awaitable[None]]


class Socket:
    """One accepted connection: texts come in, JSON documents go out."""

    def __init__(self, parameters: Mapping[str, str], receive: Receive, send: Send) -> None:
        self.parameters = parameters
        self._receive = receive
        self._send = send

    async def receive(self) -> str | None:
        """Return the next text, or None once the other side is gone. Bytes are decoded."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        if text is not None:
            return text
        return bytes(message["bytes"]).decode(errors="replace")

    async def send(self, document: Any) -> None:
        """Send one document."""
        text = pydantic_core.to_json(document, inf_nan_mode="null").decode()
        await self._send({"type": "websocket.send", "text": text})


class SocketEndpoint:
    """An ASGI application that serves one such route."""

    def __init__(self, route: SocketRoute, *, calls: Calls, token: Token) -> None:
        self._route = route
        self._token = token
        self._begin = calls.starter(route.name, "rest")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection to its end."""
        await receive()  # websocket.connect
        if not self._is_allowed(dict(scope["headers"])):
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # HTTP 403
            return
        await send({"type": "websocket.accept"})
        call = self._begin()
        call.set_request(None)
        status, code = "CANCELLED", _INTERNAL
        try:
            async with while_allowed():
                await self._route.handle(Socket(scope["path_params"], receive, send))
            status, code = "OK", _NORMAL
        except asyncio.CancelledError:
            raise
        except Exception as error:
            public = public_error(error)
            status = public.status.name if isinstance(error, DialoopError) else "INTERNAL"
        finally:
            call.end(status)
        await _close(send, code)

    def _is_allowed(self, headers: Mapping[bytes, bytes]) -> bool:
        if not self._token.tells_apart(self._route.scope):
            return True
        authorization = bearer_of(authorization_of(headers))
        try:
            self._token.require(authorization, self._route.name, self._route.scope)
        except PermissionDenied:
            return False
        return True


async def _close(send: Send, code: int) -> None:
    """Close our side, which may be closed already."""
    try:
        await send({"type": "websocket.close", "code": code})
    except Exception:
        log.debug("The connection was gone.", exc_info=True)


def require_sockets() -> None:
    """Raise InvalidConfig (PACKAGE_MISSING) unless WebSockets can be served."""
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            "Serving WebSockets needs the `websockets` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop-extras[openenv]"',
        ) from error
