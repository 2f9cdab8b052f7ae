"""What is known of every call, whichever door it came through: log fields, log line, counts.

CallContext is the part of gRPC's context that servicers may use, for doors that are not gRPC's.
"""

from __future__ import annotations

import logging
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop_services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    from google.protobuf.descriptor import Descriptor

log = logging.getLogger(__name__)

# Requests carry these, or have a message that does; logs carry them on.
_IDS = ("run", "session_id", "group_id", "trajectory_id")
_CARRIERS = ("step", "group", "trajectory", "request")
_MAX_ID = 128


class Counter(Protocol):
    """What counts calls (dialoop_services.runtime.metrics)."""

    def started(self, door: str) -> None:
        """A call has begun."""

    def ended(self, rpc: str, door: str, status: str, seconds: float) -> None:
        """A call has ended with a status, as "OK" or "NOT_FOUND"."""


class Calls:
    """Observes calls; the counter is there only where somebody can ask for the counts."""

    def __init__(self, counter: Counter | None = None) -> None:
        self._counter = counter

    def beginning(self, rpc: str, door: str) -> Callable[[], Call]:
        """A function that is called when a call of `rpc` has come in through `door`."""
        return partial(Call, rpc, door, self._counter)


class Call:
    """One call, from its coming in to its end."""

    __slots__ = ("_counter", "_door", "_rpc", "_started")

    def __init__(self, rpc: str, door: str, counter: Counter | None) -> None:
        self._rpc, self._door, self._counter = rpc, door, counter
        if counter is not None:
            counter.started(door)
        self._started = time.perf_counter()

    def asks(self, request: Any) -> None:
        """Its request is known: from now on all log records of this task carry its ids."""
        add_log_fields({"rpc": self._rpc, **ids_of(request)})

    def end(self, status: str) -> None:
        """It has ended with a status."""
        seconds = time.perf_counter() - self._started
        if self._counter is not None:
            self._counter.ended(self._rpc, self._door, status, seconds)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"door": self._door, "status": status, "seconds": round(seconds, 6)}
            log.debug("Answered.", extra=fields)


class CallContext:
    """One call's context; holds a status once the method has set one."""

    def __init__(self, metadata: tuple[tuple[str, Any], ...] = ()) -> None:
        self._metadata = metadata
        self._code: Any = None
        self._details = ""

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """Return what the caller sent beside the request."""
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Keep the status, as the generated class does before it raises NotImplementedError."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Keep the text."""
        self._details = details

    def code(self) -> Any:
        """Return the status that was set; None before."""
        return self._code

    def details(self) -> str:
        """Return the text that was set."""
        return self._details


def ids_of(request: Any) -> dict[str, str]:
    """The ids that a request carries, cut to a length that a log can bear."""
    descriptor = getattr(request, "DESCRIPTOR", None)
    if descriptor is None:  # an iterator of requests
        return {}
    found: dict[str, str] = {}
    for carrier, name in _places(descriptor):
        value = getattr(getattr(request, carrier) if carrier else request, name)
        if value:
            found[name] = value[:_MAX_ID]
    return found


@cache
def _places(descriptor: Descriptor) -> tuple[tuple[str, str], ...]:
    """Where a message has ids: carrier (or none) and field; its own come last and win."""
    fields = descriptor.fields_by_name
    inner = {name: fields[name].message_type for name in _CARRIERS if name in fields}
    return (
        *((name, i) for name, kind in inner.items() for i in _ids_in(kind)),
        *(("", i) for i in _ids_in(descriptor)),
    )


def _ids_in(descriptor: Descriptor | None) -> list[str]:
    return [] if descriptor is None else [i for i in _IDS if i in descriptor.fields_by_name]
