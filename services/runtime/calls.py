"""What is known of every call, whichever door it came through: log fields, log line, counts."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from services.runtime.errors import wrapped
from services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from services.runtime.errors import Context, Handler

log = logging.getLogger(__name__)

# Requests carry these, or have a message that does; logs carry them on.
_IDS = ("run", "session_id", "group_id", "trajectory_id")
_CARRIERS = ("step", "group", "trajectory", "request")
_MAX_ID = 128
_OURS = "/dialoop."


class Counter(Protocol):
    """What counts calls (services.runtime.metrics)."""

    def started(self, door: str) -> None:
        """A call has begun."""

    def ended(self, rpc: str, door: str, status: str, seconds: float) -> None:
        """A call has ended with a status, as "OK" or "NOT_FOUND"."""


class Calls:
    """Observes calls; the counter is there only where somebody can ask for the counts."""

    def __init__(self, counter: Counter | None = None) -> None:
        self._counter = counter

    def begin(self, rpc: str, door: str) -> Call:
        """A call that has come in."""
        if self._counter is not None:
            self._counter.started(door)
        return Call(rpc, door, self._counter)


class Call:
    """One call, from its coming in to its end."""

    __slots__ = ("_counter", "_door", "_rpc", "_started")

    def __init__(self, rpc: str, door: str, counter: Counter | None) -> None:
        self._rpc, self._door, self._counter = rpc, door, counter
        self._started = time.perf_counter()

    def asks(self, request: Any) -> None:
        """Its request is known: from now on all log records of this task carry its ids."""
        add_log_fields(rpc=self._rpc, **ids_of(request))

    def end(self, status: str) -> None:
        """It has ended with a status."""
        seconds = time.perf_counter() - self._started
        if self._counter is not None:
            self._counter.ended(self._rpc, self._door, status, seconds)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"door": self._door, "status": status, "seconds": round(seconds, 6)}
            log.debug("Answered.", extra=fields)


def ids_of(request: Any) -> dict[str, str]:
    """The ids that a request carries, cut to a length that a log can bear."""
    found: dict[str, str] = {}
    if hasattr(request, "DESCRIPTOR"):
        for carrier in _CARRIERS:
            if carrier in request.DESCRIPTOR.fields_by_name:
                found |= _own_ids_of(getattr(request, carrier))
        found |= _own_ids_of(request)
    return found


def _own_ids_of(request: Any) -> dict[str, str]:
    fields = request.DESCRIPTOR.fields_by_name
    values = {name: getattr(request, name) for name in _IDS if name in fields}
    return {name: value[:_MAX_ID] for name, value in values.items() if value}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Observes the calls of the gRPC door; outermost, so that it sees the status."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call of ours; health checks and reflection stay uncounted."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_OURS):
            return handler
        rpc = method.removeprefix(_OURS).removeprefix("v1.").replace("/", ".")
        return wrapped(handler, lambda function: self._observing(function, rpc))

    def _observing(self, function: Any, rpc: str) -> Any:
        if inspect.isasyncgenfunction(function):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                call = self._calls.begin(rpc, "grpc")
                call.asks(request)
                status = "CANCELLED"
                try:
                    async for response in function(request, context):
                        yield response
                    status = "OK"
                except Exception:
                    status = _status_of(context)
                    raise
                finally:
                    call.end(status)

            return stream

        async def unary(request: Any, context: Context) -> Any:
            call = self._calls.begin(rpc, "grpc")
            call.asks(request)
            status = "OK"
            try:
                return await function(request, context)
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            except Exception:
                status = _status_of(context)
                raise
            finally:
                call.end(status)

        return unary


def _status_of(context: Context) -> str:
    """The status that the error's abort has left in the context."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {known.value[0]: known.name for known in grpc.StatusCode}
    return names.get(code, "UNKNOWN")
