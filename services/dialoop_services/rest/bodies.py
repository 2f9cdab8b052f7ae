"""Reading a request's body: no larger than allowed, also after it was unpacked."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_services.rest.problems import BodyTooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

# What is unpacked between two looks at the other requests: about 0.1 ms of work.
_SLICE_BYTES = 1 << 16


class CallerGone(Exception):
    """Nobody waits for an answer any more."""


async def read_body(
    receive: Callable[[], Awaitable[Any]], headers: Mapping[bytes, bytes], limit: int
) -> bytes:
    """The whole body, unpacked; BodyTooLarge as soon as it is known to be above `limit` bytes."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip"):
        raise UnsupportedMediaType(
            "The body's content-encoding is not read here.",
            reason=Reason.UNSUPPORTED_ENCODING,
            remedy="Send it plain, or with `content-encoding: gzip`.",
        )
    chunks = _chunks(receive)
    return await _collected(chunks if encoding == b"identity" else _unpacked(chunks), limit)


async def _chunks(receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _collected(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Slice by slice, so that a bomb fills neither the memory nor the event loop."""
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in chunks:
        while chunk and not unpacking.eof:
            yield _unpack(unpacking, chunk)
            chunk = unpacking.unconsumed_tail
            await asyncio.sleep(0)
        if chunk or unpacking.unused_data:
            raise _bad_gzip()
    if not unpacking.eof:
        raise _bad_gzip()


def _unpack(unpacking: Any, chunk: bytes) -> bytes:
    try:
        found: bytes = unpacking.decompress(chunk, _SLICE_BYTES)
    except zlib.error as error:
        raise _bad_gzip() from error
    return found


def _bad_gzip() -> InvalidInput:
    return InvalidInput(
        "The body is not one whole gzip member.",
        reason=Reason.BAD_GZIP,
        remedy="Send one gzip member, or leave content-encoding out.",
    )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is above {limit} bytes, as sent or unpacked.",
        remedy="Send fewer or shorter items, or raise max_message_bytes of the service.",
    )
