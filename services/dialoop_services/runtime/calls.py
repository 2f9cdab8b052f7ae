"""Log fields, log lines and counts of calls, the same for every door.

CallContext is the part of gRPC's context that servicers may use, for the other doors.
"""

from __future__ import annotations

import logging
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.clients.errors import STARTED_METADATA
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from google.protobuf.unknown_fields import UnknownFieldSet

from dialoop_services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

log = logging.getLogger(__name__)

# Log records have these ids of a request, which may be in one of its messages.
_IDS = ("run", "session_id", "group_id", "trajectory_id")
_CARRIERS = ("step", "group", "trajectory", "request")
_MAX_ID = 128


def require_known_fields(request: Message) -> None:
    """Raise InvalidInput (UNKNOWN_FIELD) for fields that the protos do not have (any more).

    To leave one out would answer another question, such as one of an earlier client that names
    what came before by a digest.
    """
    unknown = UnknownFieldSet(request)
    numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
    if numbers:
        raise InvalidInput(
            f"{request.DESCRIPTOR.name} has fields with the unknown numbers "
            f"{', '.join(map(str, numbers))}.",
            reason=Reason.UNKNOWN_FIELD,
            remedy="The client is of another version: install the one that the service has.",
        )


class Counter(Protocol):
    """Counts calls, as dialoop_services.runtime.metrics does."""

    def count_start(self, door: str) -> None:
        """Count a call that has begun."""

    def count_end(self, rpc: str, door: str, status: str, seconds: float) -> None:
        """Count a call that has ended; `status` is a name such as "OK" or "NOT_FOUND"."""


class Calls:
    """Observes calls; there is a counter only where somebody can read the counts."""

    def __init__(self, counter: Counter | None = None) -> None:
        self._counter = counter

    def starter(self, rpc: str, door: str) -> Callable[[], Call]:
        """Return a function that begins the observation of one call of `rpc` at `door`."""
        return partial(Call, rpc, door, self._counter)


class Call:
    """One call, from its arrival to its end."""

    __slots__ = ("_counter", "_door", "_rpc", "_started_at")

    def __init__(self, rpc: str, door: str, counter: Counter | None) -> None:
        self._rpc, self._door, self._counter = rpc, door, counter
        if counter is not None:
            counter.count_start(door)
        self._started_at = time.perf_counter()

    def set_request(self, request: Any) -> None:
        """Add the request's ids to all later log records of this task."""
        add_log_fields({"rpc": self._rpc, **ids_of(request)})

    def end(self, status: str) -> None:
        """Count and log the end of the call with the name of its status."""
        seconds = time.perf_counter() - self._started_at
        if self._counter is not None:
            self._counter.count_end(self._rpc, self._door, status, seconds)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"door": self._door, "status": status, "seconds": round(seconds, 6)}
            log.debug("Answered.", extra=fields)


class CallContext:
    """The context of one call, with the status that the method has set."""

    def __init__(self, metadata: tuple[tuple[str, Any], ...] = ()) -> None:
        self._metadata = metadata
        self._code: Any = None
        self._details = ""

    async def send_initial_metadata(self, metadata: tuple[tuple[str, Any], ...]) -> None:
        """Do nothing: a caller in this process outlives no service."""

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """Return the metadata that the caller sent with the request."""
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status; generated classes do so before they raise NotImplementedError."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the status's text."""
        self._details = details

    def code(self) -> Any:
        """Return the status, or None if none was set."""
        return self._code

    def details(self) -> str:
        """Return the status's text, which is empty if none was set."""
        return self._details


async def announce_start(context: Any) -> None:
    """Tell the caller that this service now works on the call.

    If the connection breaks after that, the caller gets SERVICE_DIED and not a plain outage.
    """
    await context.send_initial_metadata(((STARTED_METADATA, "1"),))


def ids_of(request: Any) -> dict[str, str]:
    """Return the ids in a request by name, each cut to 128 characters for the log."""
    descriptor = getattr(request, "DESCRIPTOR", None)
    if descriptor is None:  # an iterator of requests
        return {}
    ids: dict[str, str] = {}
    for carrier, name in _places(descriptor):
        value = getattr(getattr(request, carrier) if carrier else request, name)
        if value:
            ids[name] = value[:_MAX_ID]
    return ids


@cache
def _places(descriptor: Descriptor) -> tuple[tuple[str, str], ...]:
    """Return where a message has ids, as carrier ("" for itself) and field.

    The message's own ids come last, so that they win.
    """
    fields = descriptor.fields_by_name
    inner = {name: fields[name].message_type for name in _CARRIERS if name in fields}
    return (
        *((name, i) for name, kind in inner.items() for i in _ids_in(kind)),
        *(("", i) for i in _ids_in(descriptor)),
    )


def _ids_in(descriptor: Descriptor | None) -> list[str]:
    return [] if descriptor is None else [i for i in _IDS if i in descriptor.fields_by_name]
