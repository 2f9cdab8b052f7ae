"""A request as it comes in: its caller, who may disconnect, its deadline, and its body.

A body's size is limited before and after decompression.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import zlib
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    DialoopError,
    InvalidInput,
    Unavailable,
)
from dialoop.reasons import Reason

from dialoop_services.rest.problems import (
    BodyTooLarge,
    FieldsRefused,
    RequestTooSlow,
    UnsupportedMediaType,
)
from dialoop_services.runtime.calls import too_many_items
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from dialoop_services.runtime.calls import Call, CallLimits

TIMEOUT_HEADER = "x-request-timeout-s"
# Calls that end before this are not watched: a watcher task for each would cost time.
_UNWATCHED_S = 0.05
# Of a longer body the long lists of numbers are left out before it is read for its keys.
_MAX_PARSED_BYTES = 1 << 18
_NUMBERS = re.compile(rb"\[[-+0-9.eE,\s]{256,}+\]")
# Bytes that are decompressed before other requests get a turn: about 0.1 ms of work.
_SLICE_BYTES = 1 << 16


class Caller:
    """The client of one call. Inside its context, a disconnect cancels the task that answers."""

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self.receive = receive
        self.is_disconnected = False
        """Whether the client closed the connection."""
        self._answering: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._answering = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._start)

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def clear_cancellation(self) -> bool:
        """Return whether a disconnect caused the cancellation; if so, clear it."""
        if self.is_disconnected and self._answering is not None:
            self._answering.uncancel()
        return self.is_disconnected

    def _start(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.is_disconnected = True
        assert self._answering is not None
        self._answering.cancel()


def timeout_of(headers: Mapping[bytes, bytes]) -> float | None:
    """Return the seconds within which the caller wants an answer; None for no limit."""
    text = headers.get(TIMEOUT_HEADER.encode())
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise FieldsRefused(
            f"{TIMEOUT_HEADER} is not a positive number of seconds.",
            reason=Reason.INVALID_FIELD,
            remedy="Give a number above 0, or leave the header out.",
            fields=[TIMEOUT_HEADER],
        )
    return seconds


class Failing(Protocol):
    """An answer that may end in an error."""

    async def fail(self, error: DialoopError) -> None:
        """Answer with the error, or end a started answer with it."""


async def serve_call(call: Call, caller: Caller, answer: Failing, serving: Awaitable[None]) -> None:
    """Await `serving`, end `call` with its status, and answer with what it raises."""
    try:
        status = "CANCELLED"
        try:
            await serving
            status = "OK"
        except Exception as error:
            status = error.status.name if isinstance(error, DialoopError) else "INTERNAL"
            raise
        finally:
            call.end(status)
    except ClientDisconnected:
        return
    except asyncio.CancelledError:
        if not caller.clear_cancellation():  # the server's time to drain has run out
            stopping = Unavailable(
                "The service is stopping.",
                reason=Reason.STOPPING,
                remedy="Try again when it is back.",
            )
            await answer.fail(stopping)
    except Exception as error:
        await answer.fail(public_error(error))


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raise DeadlineExceeded when the block takes longer than `seconds`; None for no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(
            f"The service did not answer within {seconds:g} s.",
            remedy=f"Raise {TIMEOUT_HEADER}, or send a smaller request.",
        ) from error


@dataclass(slots=True)
class BodyLimits:
    """What bodies may take: each one alone, and all that are coming in together.

    calls: of one, as sent or decompressed. max_pending_bytes: of all whose last byte has not
    come; the next part beyond it is refused. time_s: seconds from head to last byte.
    """

    calls: CallLimits
    max_pending_bytes: int = 1 << 28
    time_s: float = 120.0
    num_pending_bytes: int = 0


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(
    receive: Callable[[], Awaitable[Any]],
    headers: Mapping[bytes, bytes],
    limits: BodyLimits,
    rpc: str,
) -> bytes:
    """Return the whole body of a request to a rpc or route, decompressed.

    Raise BodyTooLarge once it exceeds the limit, RequestTooSlow, or CapacityExhausted (CAPACITY)
    where all that come in at the moment take too much memory.
    """
    limit = limits.calls.max_bytes(rpc)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limits.calls, rpc)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip"):
        raise UnsupportedMediaType(
            "The service does not read the body's content-encoding.",
            reason=Reason.UNSUPPORTED_ENCODING,
            remedy="Send the body uncompressed, or with `content-encoding: gzip`.",
        )
    try:
        async with asyncio.timeout(limits.time_s) as timer:
            first = await receive()
            is_whole = first["type"] == "http.request" and not first.get("more_body")
            if encoding == b"identity" and is_whole:
                body: bytes = first.get("body", b"")  # as nearly always
                if len(body) > limit:
                    raise _too_large(limits.calls, rpc)
                return body
            chunks = _chunks(first, receive)
            return await _collect(
                chunks if encoding == b"identity" else _decompress(chunks), limits, rpc
            )
    except TimeoutError:
        if not timer.expired():
            raise
        raise RequestTooSlow(
            f"The body did not come within {limits.time_s:g} s.",
            remedy="Send it at once, or in smaller requests.",
        ) from None


async def _chunks(
    message: dict[str, Any], receive: Callable[[], Awaitable[Any]]
) -> AsyncIterator[bytes]:
    """Yield the parts of a body, of which the first message has come."""
    while message["type"] != "http.disconnect":
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
        message = await receive()
    raise ClientDisconnected


async def _collect(chunks: AsyncIterator[bytes], limits: BodyLimits, rpc: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            size += len(chunk)
            limits.num_pending_bytes += len(chunk)
            if size > limits.calls.max_bytes(rpc):
                raise _too_large(limits.calls, rpc)
            if limits.num_pending_bytes > limits.max_pending_bytes:
                raise CapacityExhausted(
                    f"Bodies of more than {limits.max_pending_bytes} bytes are coming in.",
                    remedy="Try again later, or send smaller requests.",
                )
            parts.append(chunk)
    finally:
        limits.num_pending_bytes -= size
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _decompress(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the content slice by slice, so that a zip bomb fills neither memory nor event loop."""
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in chunks:
        while chunk and not decompressor.eof:
            yield _decompress_slice(decompressor, chunk)
            chunk = decompressor.unconsumed_tail
            await asyncio.sleep(0)
        if chunk or decompressor.unused_data:
            raise _bad_gzip()
    if not decompressor.eof:
        raise _bad_gzip()


def _decompress_slice(decompressor: Any, chunk: bytes) -> bytes:
    try:
        content: bytes = decompressor.decompress(chunk, _SLICE_BYTES)
    except zlib.error as error:
        raise _bad_gzip() from error
    return content


def _bad_gzip() -> InvalidInput:
    return InvalidInput(
        "The body is not one complete gzip member.",
        reason=Reason.BAD_GZIP,
        remedy="Send one gzip member, or leave content-encoding out.",
    )


def require_few_values(body: bytes, most: int) -> None:
    """Raise InvalidInput (TOO_MANY_ITEMS) for JSON with too many objects, lists, keys or numbers.

    Of numbers there may be far more: a column has as many as there are tokens.
    """
    # An item is an object of a few keys and texts, or a few numbers.
    if len(body) <= 4 * most or not _has_more(body, most, body.count(b'"') // 2):
        return
    # Many of the marks may stand inside texts. Without escapes every second quote ends one.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > 4 * most or _has_more(b"".join(plain.split(b'"')[::2]), most, num_texts):
        raise too_many_items(most)


def require_unique_keys(body: bytes) -> None:
    """Raise FieldsRefused for JSON with a key that stands twice in one object.

    What is no JSON is left to who reads it.
    """
    if len(body) > _MAX_PARSED_BYTES:
        body = _NUMBERS.sub(b"[]", body)
    try:
        _KEYS.decode(body.decode())
    except _StandsTwice as twice:
        (key,) = twice.args
        raise FieldsRefused(
            f"{key[:100]!r} stands twice in one object.",
            reason=Reason.INVALID_JSON,
            remedy="Send each field once.",
            fields=[key[:100]],
        ) from None
    except (ValueError, RecursionError):
        return


class _StandsTwice(Exception):
    """A key stands twice in one object."""


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _StandsTwice(key)


_KEYS = json.JSONDecoder(object_pairs_hook=_require_unique)


def _has_more(body: bytes, most: int, num_texts: int) -> bool:
    num_marks = body.count(b"{") + body.count(b"[") + body.count(b":")
    return num_texts + num_marks > 4 * most or body.count(b",") > 32 * most


def _too_large(limits: CallLimits, rpc: str) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has more than {limits.max_bytes(rpc)} bytes, as sent or decompressed.",
        remedy=f"Send fewer or shorter items, or raise the service's {limits.setting(rpc)}.",
    )
