"""Read the body of a request, whose size is limited before and after decompression."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.errors import CapacityExhausted, InvalidInput
from dialoop.reasons import Reason

from dialoop_services.rest.problems import BodyTooLarge, RequestTooSlow, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

# Bytes that are decompressed before other requests get a turn: about 0.1 ms of work.
_SLICE_BYTES = 1 << 16


@dataclass(slots=True)
class BodyLimits:
    """What bodies may take: each one alone, and all that are coming in together.

    max_bytes: of one, as sent or decompressed. max_pending_bytes: of all whose last byte has not
    come; the next part beyond it is refused. time_s: seconds from head to last byte.
    """

    max_bytes: int
    max_pending_bytes: int = 1 << 28
    time_s: float = 120.0
    num_pending_bytes: int = 0


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(
    receive: Callable[[], Awaitable[Any]], headers: Mapping[bytes, bytes], limits: BodyLimits
) -> bytes:
    """Return the whole body, decompressed.

    Raise BodyTooLarge once it exceeds the limit, RequestTooSlow, or CapacityExhausted (CAPACITY)
    where all that come in at the moment take too much memory.
    """
    limit = limits.max_bytes
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip"):
        raise UnsupportedMediaType(
            "The service does not read the body's content-encoding.",
            reason=Reason.UNSUPPORTED_ENCODING,
            remedy="Send the body uncompressed, or with `content-encoding: gzip`.",
        )
    first = await receive()
    if encoding == b"identity" and not first.get("more_body") and first["type"] == "http.request":
        body: bytes = first.get("body", b"")  # as nearly always
        if len(body) > limit:
            raise _too_large(limit)
        return body
    chunks = _chunks(first, receive)
    try:
        async with asyncio.timeout(limits.time_s) as timer:
            return await _collect(
                chunks if encoding == b"identity" else _decompress(chunks), limits
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


async def _collect(chunks: AsyncIterator[bytes], limits: BodyLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            size += len(chunk)
            limits.num_pending_bytes += len(chunk)
            if size > limits.max_bytes:
                raise _too_large(limits.max_bytes)
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


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has more than {limit} bytes, as sent or decompressed.",
        remedy="Send fewer or shorter items, or raise the service's max_message_bytes.",
    )
