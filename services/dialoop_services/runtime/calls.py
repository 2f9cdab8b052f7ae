"""Log fields, log lines and counts of calls, and how long these may go on, for every server."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dialoop.clients.errors import STARTED_METADATA
from dialoop.errors import CapacityExhausted, DialoopError, InvalidInput, Unauthenticated
from dialoop.reasons import Reason
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.unknown_fields import UnknownFieldSet

from dialoop_services.runtime.access.principals import current_principal
from dialoop_services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Log records have these ids of a request, which may be in one of its messages.
_IDS = ("run", "session_id", "group_id", "trajectory_id")
_CARRIERS = ("step", "group", "trajectory", "request")
_MAX_ID = 128
_LOOK_EVERY_S = 0.25


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


_OF_ONE_EPISODE = frozenset(
    f"EnvironmentService.{name}" for name in ("BatchReset", "Interact", "Reset", "Score")
)
_OF_MANY = frozenset(
    {
        *(f"ReplayService.{name}" for name in ("AppendGroups", "AppendMembers", "AppendTurns")),
        *(f"ScorerService.{name}" for name in ("LogProb", "RetrieveKl", "Score")),
    }
)
LARGE = _OF_ONE_EPISODE | _OF_MANY
"""Rpcs whose requests hold trajectories, or an episode to go on with. Weights come as a stream of
small chunks."""
_UNCOUNTED_BYTES = 1 << 14  # what is in a shorter message is too little to take long
_LONG_BYTES = 1 << 16  # to work on more takes so long that other calls should go on meanwhile
MAX_ITEMS, MAX_LARGE_ITEMS = 1 << 14, 1 << 17
"""Most messages and texts in the lists of one request, and of one with many trajectories."""


_VARINT, _LENGTH, _SIZES = 0, 2, {1: 8, 5: 4}  # kinds of fields, as they are serialised
_FIELDS_OF_AN_ITEM = 8


def _cost(data: memoryview, descriptor: Descriptor, most: int) -> int:
    """Return how many fields a serialised message has, also inside others, or above `most`.

    A list's item counts as some fields more. What holds no lists is not looked into: that it has
    the length of its bytes is limit enough. Before it is decoded, since a message of a few bytes
    may become one of a hundred.
    """
    fields, cost, at, end = _costly_fields(descriptor), 0, 0, len(data)
    while at < end and cost <= most:
        tag, at = _varint(data, at)
        number, kind, cost = tag >> 3, tag & 7, cost + 1
        if number == 0:
            break  # decoding refuses it
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LENGTH:
            length, at = _varint(data, at)
            is_list, inner = fields.get(number, (False, None))
            cost += _FIELDS_OF_AN_ITEM if is_list else 0
            if inner is not None:
                cost += _cost(data[at : at + length], inner, most - cost)
            at += length
        else:
            at += _SIZES.get(kind, 0)
    return cost


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends; IndexError where the bytes end before."""
    value = shift = 0
    while (byte := data[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


@cache
def _costly_fields(descriptor: Descriptor) -> dict[int, tuple[bool, Descriptor | None]]:
    """Return the fields that are or hold lists of more than numbers, by number.

    Each with whether it is a list, and the message in which there may be such lists.
    """
    fields = {}
    for field in descriptor.fields:
        kind = field.message_type
        is_map = kind is not None and kind.GetOptions().map_entry
        inner = kind if kind is not None and not is_map and _costly_fields(kind) else None
        is_costly = kind is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        is_list = field.is_repeated and is_costly
        if inner is not None or is_list:
            fields[field.number] = (is_list, inner)
    return fields


class CallLimits:
    """How many calls of a server run at the same time, and how long their messages are.

    Only calls of those who have a right are counted: the others are refused at once.
    """

    def __init__(
        self, *, max_calls: int = 8192, max_bytes: int = 4 << 20, max_large_bytes: int = 64 << 20
    ) -> None:
        self._max_calls = max_calls
        self._max_bytes, self._max_large_bytes = max_bytes, max(max_bytes, max_large_bytes)
        self._num_calls = 0

    def max_bytes(self, rpc: str) -> int:
        """Return the bytes of the longest message that a rpc, Service.Method, takes."""
        return self._max_large_bytes if rpc in LARGE else self._max_bytes

    def setting(self, rpc: str) -> str:
        """Return the name of the setting which `max_bytes` is."""
        return "max_large_message_bytes" if rpc in LARGE else "max_message_bytes"

    def too_large(self, rpc: str) -> CapacityExhausted:
        """Return the error of a longer message."""
        return CapacityExhausted(
            f"The message to {rpc} has more than {self.max_bytes(rpc)} bytes.",
            reason=Reason.MESSAGE_TOO_LARGE,
            remedy=f"Send fewer or shorter items, or raise the service's {self.setting(rpc)}.",
        )

    def require_few_items(self, data: bytes, kind: Descriptor, rpc: str) -> None:
        """Raise InvalidInput (TOO_MANY_ITEMS) where a serialised request has too many items."""
        most = self.max_items(rpc)
        if len(data) > _UNCOUNTED_BYTES:
            most_fields = _FIELDS_OF_AN_ITEM * most
            with suppress(IndexError):  # it is cut off, which decoding says
                if _cost(memoryview(data), kind, most_fields) > most_fields:
                    raise too_many_items(most)

    def max_items(self, rpc: str) -> int:
        """Return how many items the lists of a request to a rpc may have, all together."""
        return MAX_LARGE_ITEMS if rpc in _OF_MANY else MAX_ITEMS

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a call's place for the block; CapacityExhausted (CAPACITY) where there is none."""
        if self._num_calls >= self._max_calls:
            raise CapacityExhausted(
                f"{self._max_calls} calls are being answered already.",
                remedy="Try again later, or raise the service's max_calls.",
            )
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Return what `work` makes of so many bytes of a request; of many in a thread."""
    return await asyncio.to_thread(work) if size > _LONG_BYTES else work()


def too_many_items(most: int) -> InvalidInput:
    """Return the error of a request with more items than a service works on at once."""
    return InvalidInput(
        f"The request has more than {most} messages, texts or fields in lists.",
        reason=Reason.TOO_MANY_ITEMS,
        remedy="Send them in several requests.",
    )


class Counter(Protocol):
    """Counts calls, as dialoop_services.runtime.metrics does."""

    def count_start(self, server: str) -> None:
        """Count a call that has begun."""

    def count_end(self, rpc: str, server: str, status: str, seconds: float) -> None:
        """Count a call that has ended; `status` is a name such as "OK" or "NOT_FOUND"."""


class Calls:
    """Observes calls; there is a counter only where somebody can read the counts."""

    def __init__(self, counter: Counter | None = None) -> None:
        self._counter = counter

    def starter(self, rpc: str, server: str) -> Callable[[], Call]:
        """Return a function that begins the observation of one call of `rpc` at `server`."""
        return partial(Call, rpc, server, self._counter)


class Call:
    """One call, from its arrival to its end."""

    __slots__ = ("_counter", "_rpc", "_server", "_started_at")

    def __init__(self, rpc: str, server: str, counter: Counter | None) -> None:
        self._rpc, self._server, self._counter = rpc, server, counter
        if counter is not None:
            counter.count_start(server)
        self._started_at = time.perf_counter()

    def set_request(self, request: Any) -> None:
        """Add the request's ids to all later log records of this task."""
        add_log_fields({"rpc": self._rpc, **ids_of(request)})

    def end(self, status: str) -> None:
        """Count and log the end of the call with the name of its status."""
        seconds = time.perf_counter() - self._started_at
        if self._counter is not None:
            self._counter.count_end(self._rpc, self._server, status, seconds)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"door": self._server, "status": status, "seconds": round(seconds, 6)}
            log.debug("Answered.", extra=fields)


class RightEnded(Unauthenticated):
    """The right with which a call was made has ended while the call ran."""


def while_allowed() -> AbstractAsyncContextManager[None]:
    """Cancel the block within a second after its caller's right has ended; raise RightEnded."""
    caller = current_principal.get()
    if caller is None or caller.recheck is None:  # as nearly always, so it costs little
        return nullcontext()
    return _while_right_lasts(caller.recheck)


@asynccontextmanager
async def _while_right_lasts(recheck: Callable[[], None]) -> AsyncIterator[None]:
    task = asyncio.current_task()
    if task is None:
        yield
        return
    refusals: list[DialoopError] = []

    async def watch() -> None:
        while not refusals:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                recheck()
            except DialoopError as error:
                refusals.append(error)
                task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if refusals and not task.uncancel():
            first = refusals[0]
            raise RightEnded(first.message, reason=first.reason, remedy=first.remedy) from None
        raise
    finally:
        watching.cancel()


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
