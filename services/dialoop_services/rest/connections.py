"""HTTP connections with limits: their number, the size of a head, the time that a request has.

A connection that sends nothing, or half a request, costs a descriptor and memory. Where there are
as many as there may be, the one that has been idle longest makes room for the next.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dialoop.errors import CapacityExhausted, InvalidInput
from dialoop.reasons import Reason
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dialoop_services.rest.problems import RequestTooSlow, problem_body, problem_headers

if TYPE_CHECKING:
    from dialoop.errors import DialoopError

    from dialoop_services.runtime.listening import ConnectionLimits

MAX_HEAD_BYTES = 1 << 16
_BODY_GRACE_S = 5.0


class HeadTooLarge(InvalidInput):
    """A request's line and headers are above the limit."""

    http_status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    default_reason = Reason.MESSAGE_TOO_LARGE


class LimitedConnection(HttpToolsProtocol):
    """One connection of uvicorn's, with limits."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._idle_since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading_head = True
        self._num_head_bytes = 0
        self._refusal: DialoopError | None = None

    @property
    def idle_since(self) -> float | None:
        """Return the loop's time at which the last answer ended; None while one is being made."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return None if is_answering else self._idle_since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it where all others are at work."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            self._refuse(
                CapacityExhausted(
                    f"This service answers on {self._limits.max_connections} connections already.",
                    remedy="Use fewer connections, each for several requests, or try again later.",
                )
            )
            return
        self._start_timer(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has come, and refuse a head that grows without end."""
        if self.transport.is_closing():
            return
        if self._is_reading_head:
            self._num_head_bytes += len(data)
            if self._timer is None:
                self._start_timer(self._limits.head_s)
        super().data_received(data)
        is_too_long = self._is_reading_head and self._num_head_bytes > MAX_HEAD_BYTES
        if is_too_long and not self.transport.is_closing():
            self._refuse(
                HeadTooLarge(
                    f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes.",
                    remedy="Send what is long in the body.",
                )
            )

    def on_headers_complete(self) -> None:
        """Begin the answer; the body has its own time."""
        self._is_reading_head, self._num_head_bytes = False, 0
        self._start_timer(self._limits.body_s + _BODY_GRACE_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the whole request has come."""
        self._stop_timer()
        self._is_reading_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to another protocol, which has no use for the time limit."""
        self._stop_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP with a problem document."""
        self._refuse(
            InvalidInput(
                "What was sent is not HTTP/1.1.",
                reason=Reason.INVALID_HTTP,
                remedy="Speak HTTP/1.1 on this port; gRPC has its own.",
            )
        )

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        idle = [
            (since, id(other), other)
            for other in self.connections
            if isinstance(other, LimitedConnection)
            and other is not self
            and not other.transport.is_closing()
            and (since := other.idle_since) is not None
        ]
        if not idle:
            return False
        oldest = min(idle)[-1]
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.idle_since is None:  # an answer has begun: no other may follow on this connection
            self.transport.abort()
        else:
            self._refuse(too_slow("head", self._limits.head_s))

    def _refuse(self, error: DialoopError) -> None:
        """Answer with an error and close; between the answers of one connection, only close."""
        self._stop_timer()
        if self.idle_since is None:
            self.transport.close()
            return
        status = HTTPStatus(error.http_status)
        body = problem_body(error)
        headers = [
            *problem_headers(error),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%s: %s\r\n" % pair for pair in headers)
        self.transport.write(b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) + head)
        self.transport.write(b"\r\n" + body)
        self.transport.close()


def too_slow(part: str, seconds: float) -> RequestTooSlow:
    """Return the error of a request whose head or body has not come in time."""
    return RequestTooSlow(
        f"The request's {part} did not come within {seconds:g} s.",
        remedy="Send it at once, or in smaller requests.",
    )
