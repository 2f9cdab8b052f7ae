"""HTTP connections with limits: their number, the size of a head, the time that a request has.

A connection that sends nothing, or half a request, costs a descriptor and memory. Where there are
as many as there may be, the one that has been idle longest makes room for the next.

An answer's head and body leave in one write. uvicorn makes two, and on a loopback connection each
write is a fifth of what a short request costs the service.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dialoop.errors import CapacityExhausted, InvalidInput
from dialoop.reasons import Reason
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dialoop_services.rest.problems import RequestTooSlow, WholeAnswer, problem_answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.errors import DialoopError

    from dialoop_services.runtime.listening import ConnectionLimits

MAX_HEAD_BYTES = 1 << 16
_BODY_GRACE_S = 5.0
_STATUS_LINES = {int(s): b"HTTP/1.1 %d %s\r\n" % (s, s.phrase.encode()) for s in HTTPStatus}


class HeadTooLarge(InvalidInput):
    """A request's line and headers are above the limit."""

    http_status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    default_reason = Reason.MESSAGE_TOO_LARGE


class _JoinedWrites:
    """A transport that keeps a write until the next one, or until the event loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.whole = transport
        self.is_closing = transport.is_closing  # asked for at every request
        self._loop = loop
        self._held = b""
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def write(self, data: bytes) -> None:
        """Write, at once if something is held and else soon, so that at most one part is held."""
        if self._flushing is None:
            self._held = data
            self._flushing = self._loop.call_soon(self.flush)
            return
        held = self._take()
        if not self.is_closing():  # a transport of uvloop's raises then
            self.whole.writelines((held, data))

    def flush(self) -> None:
        """Write what is held."""
        if self._flushing is None:
            return
        held = self._take()
        if not self.is_closing():
            self.whole.write(held)

    def close(self) -> None:
        """Write what is held, and close."""
        self.flush()
        self.whole.close()

    def _take(self) -> bytes:
        assert self._flushing is not None
        self._flushing.cancel()
        self._flushing = None
        held, self._held = self._held, b""
        return held


class LimitedConnection(HttpToolsProtocol):
    """One connection of uvicorn's, with limits."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._idle_since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._keeping_alive: asyncio.TimerHandle | None = None
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
        joined: Any = _JoinedWrites(transport, self.loop)
        super().connection_made(joined)
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
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has come, and refuse a head that grows without end."""
        if self.transport.is_closing():
            return
        if self._is_reading_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_reading_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HeadTooLarge(
                    f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes.",
                    remedy="Send what is long in the body.",
                )
            )
        elif self._timer is None:  # a request that came as a whole, as nearly all do, needs none
            if not self._is_reading_head:
                self._start_timer(self._limits.body_s + _BODY_GRACE_S)
            elif self._num_head_bytes:
                self._start_timer(self._limits.head_s)

    def on_headers_complete(self) -> None:
        """Begin the answer; the body has its own time."""
        self._stop_timer()
        self._is_reading_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the whole request has come."""
        self._stop_timer()
        self._is_reading_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note when the connection became idle, and begin the next request if it has come.

        uvicorn would start a timer here and cancel it at the next request. One for the connection
        does as well, and is a twentieth of a short request cheaper.
        """
        self._idle_since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._keeping_alive is None:
            self._keep_alive(self.timeout_keep_alive)

    def _keep_alive(self, seconds: float) -> None:
        self._keeping_alive = self.loop.call_later(seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._keeping_alive = None
        is_idle = self.idle_since is not None and self._is_reading_head and not self._num_head_bytes
        ends_at = (self._idle_since if is_idle else self.loop.time()) + self.timeout_keep_alive
        if ends_at <= self.loop.time():
            self.transport.close()
        else:
            self._keep_alive(ends_at - self.loop.time())

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to another protocol, which has no use for limits of time."""
        self._stop_timers()
        joined: Any = self.transport
        joined.flush()
        self.transport = joined.whole
        super().handle_websocket_upgrade()
        # Nothing of a request is missing, so `data_received` starts no timer after this.
        self._is_reading_head, self._num_head_bytes = True, 0

    def _unsupported_upgrade_warning(self) -> None:
        """Let this be the last request: uvicorn would take its body for another one."""
        super()._unsupported_upgrade_warning()
        self.cycle.keep_alive = False

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

    def _stop_timers(self) -> None:
        self._stop_timer()
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()

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
        self.transport.write(_encode(problem_answer(error), [(b"connection", b"close")]))
        self.transport.close()


def _encode(answer: WholeAnswer, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return an answer as it is sent, with more headers."""
    lines = [b"%s: %s\r\n" % pair for pair in (*headers, *answer.headers)]
    return b"".join((_STATUS_LINES[answer.status], *lines, b"\r\n", answer.body))


def too_slow(part: str, seconds: float) -> RequestTooSlow:
    """Return the error of a request whose head or body has not come in time."""
    return RequestTooSlow(
        f"The request's {part} did not come within {seconds:g} s.",
        remedy="Send it at once, or in smaller requests.",
    )
