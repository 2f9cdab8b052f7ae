"""Limits that uvicorn lacks: the number of connections, and the time and size of a request's head.

A connection that sends nothing, or half a request, costs a descriptor and memory. Where there are
as many as there may be, the one that has been idle longest makes room for the next.
"""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import contextmanager
from http import HTTPMethod, HTTPStatus
from typing import TYPE_CHECKING, Any

from dialoop.errors import CapacityExhausted, DialoopError, InvalidInput
from dialoop.reasons import Reason
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dialoop_services.rest.problems import RequestTooSlow, problem_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop_services.rest.guard import App, Receive, Scope, Send
    from dialoop_services.runtime.listening import ConnectionLimits

MAX_HEAD_BYTES = 1 << 16
_CONNECTION = "dialoop.connection"  # in the state that uvicorn hands over with each request
_END_OF_HEAD = b"\r\n\r\n"
_METHOD = re.compile(rb"[\r\n]*([A-Z]+) ")
_METHODS = frozenset(HTTPMethod)
_ABSOLUTE = re.compile(rb"\s*[A-Z]+ https?://([^/? ]*)", re.IGNORECASE)


class HeadTooLarge(InvalidInput):
    """A request's line and headers are above the limit."""

    http_status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    default_reason = Reason.MESSAGE_TOO_LARGE


class TargetTooLong(HeadTooLarge):
    """A request's line alone is above the limit."""

    http_status = HTTPStatus.REQUEST_URI_TOO_LONG


class UnknownMethod(InvalidInput):
    """A request's method is none of HTTP's."""

    http_status = HTTPStatus.NOT_IMPLEMENTED
    default_reason = Reason.METHOD_NOT_ALLOWED


_NOT_HTTP = InvalidInput(
    "What was sent is not HTTP/1.1.",
    reason=Reason.INVALID_HTTP,
    remedy="Speak HTTP/1.1 on this port; gRPC has its own.",
)
_OTHER_HOST = InvalidInput(
    "The request's target names another host than its header Host.",
    reason=Reason.INVALID_HTTP,
    remedy="Send the path alone as the target.",
)
_HEAD_TOO_LARGE = HeadTooLarge(
    f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes.",
    remedy="Send what is long in the body.",
)

_TARGET_TOO_LONG = TargetTooLong(
    f"The request's target has more than {MAX_HEAD_BYTES} bytes.",
    remedy="Send what is long in the body.",
)
_UNKNOWN_METHOD = UnknownMethod(
    "HTTP has no such method.",
    remedy=f"Use one of {', '.join(HTTPMethod)}.",
)


def noting_requests(app: App) -> App:
    """Return the application, which tells each connection when an answer begins and ends."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        connection: LimitedConnection = scope["state"].pop(_CONNECTION)
        headers = dict(scope["headers"])
        with connection.answering(int(headers.get(b"content-length", 0))):
            is_upgrade = scope["type"] == "http" and b"upgrade" in headers
            await app(scope, receive, _closing_after(send) if is_upgrade else send)

    return noted


def _closing_after(send: Send) -> Send:
    """Return `send` for the last answer of a connection.

    uvicorn takes the body of a request with an upgrade that it does not know for another request.
    """

    async def send_last(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_last


class LimitedConnection(asyncio.Protocol):
    """One connection with limits, around uvicorn's. It sees bytes, the clock and the answers."""

    def __init__(
        self,
        connections: set[LimitedConnection],
        limits: ConnectionLimits,
        *,
        app_state: dict[str, Any],
        **options: Any,
    ) -> None:
        self._uvicorn = HttpToolsProtocol(app_state={**app_state, _CONNECTION: self}, **options)
        self._connections = connections
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = math.inf  # while an answer is being made
        self._head = b""  # of the request that is coming in
        self._num_body_bytes = 0  # those that came; below 0: those of an answered one still to come
        self._is_new = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it where all others are at work."""
        self._transport = transport
        self._uvicorn.connection_made(transport)  # type: ignore[arg-type]
        self._connections.add(self)
        if len(self._connections) > self._limits.max_connections and not self._make_room():
            self._refuse(
                CapacityExhausted(
                    f"This service answers on {self._limits.max_connections} connections already.",
                    remedy="Use fewer connections, each for several requests, or try again later.",
                )
            )
            return
        self._idle_since = self._loop.time()
        self._timer = self._loop.call_later(self._limits.head_s, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._connections.discard(self)
        self._uvicorn.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand over what has come, and refuse what is no HTTP or a head that grows without end."""
        if self._transport.is_closing():
            return
        if self._is_new and not _may_be_http(data):
            self._refuse(_NOT_HTTP)
            return
        self._is_new = False
        if self._idle_since == math.inf or self._head.endswith(_END_OF_HEAD):
            self._num_body_bytes += len(data)
        else:
            if self._timer is None:
                self._timer = self._loop.call_later(self._limits.head_s, self._time_out)
            num_due = min(max(0, -self._num_body_bytes), len(data))
            head, end, body = (self._head + data[num_due:]).partition(_END_OF_HEAD)
            self._head = head + end
            self._num_body_bytes += num_due + len(body)
        if len(self._head) > MAX_HEAD_BYTES:
            is_line = b"\r\n" not in self._head.lstrip(b"\r\n")[:MAX_HEAD_BYTES]
            self._refuse(_TARGET_TOO_LONG if is_line else _HEAD_TOO_LARGE)
            return
        if (method := _METHOD.match(self._head)) and method[1].decode() not in _METHODS:
            self._refuse(_UNKNOWN_METHOD)
            return
        if self._head.endswith(_END_OF_HEAD) and _names_another_host(self._head):
            self._refuse(_OTHER_HOST)
            return
        # After the count: uvicorn serves at once a head that it has whole.
        self._uvicorn.data_received(data)

    def pause_writing(self) -> None:
        """Let answers wait for the client."""
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        """Let answers go on."""
        self._uvicorn.resume_writing()

    @contextmanager
    def answering(self, content_length: int) -> Iterator[None]:
        """Note that an answer is being made, of a request with a body so long."""
        self._stop_timer()
        self._idle_since = math.inf
        try:
            yield
        finally:
            self._idle_since = self._loop.time()
            self._head, self._num_body_bytes = b"", min(0, self._num_body_bytes - content_length)

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; return whether there is room then."""
        # The end of an upgraded connection is not seen here: another protocol has it.
        self._connections -= {c for c in self._connections if c._transport.is_closing()}
        if len(self._connections) <= self._limits.max_connections:
            return True
        oldest = min(self._connections, key=lambda c: c._idle_since)
        if oldest._idle_since == math.inf:
            return False
        self._connections.discard(oldest)
        oldest._transport.abort()
        return True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        if not self._transport.is_closing():
            text = f"The request's head did not come within {self._limits.head_s:g} s."
            self._refuse(RequestTooSlow(text, remedy="Send it at once."))

    def _refuse(self, error: DialoopError) -> None:
        """Answer with an error and close; what follows an answered request's head: only close."""
        self._stop_timer()
        if self._num_body_bytes >= 0:
            status, headers, body = problem_answer(error)
            lines = [b"%s: %s\r\n" % pair for pair in (*headers, (b"connection", b"close"))]
            line = b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())
            self._transport.write(b"".join((line, *lines, b"\r\n", body)))
        self._transport.close()


def _names_another_host(head: bytes) -> bool:
    """Return whether an absolute target names another host than the header, which it overrules."""
    match = _ABSOLUTE.match(head)
    if match is None:
        return False
    hosts = re.findall(rb"\r\nhost:[ \t]*([^\r]*?)[ \t]*\r\n", head.lower())
    return hosts != [match[1].lower()]


def _may_be_http(begin: bytes) -> bool:
    """Return whether the first bytes of a connection may be those of a request of HTTP/1."""
    return begin.lstrip(b"\r\n")[:1].isupper() and not begin.startswith(b"PRI ")
