"""Sending answers over HTTP: one message, or many as they come.

A stream is one JSON object per line (`application/x-ndjson`), server-sent events when the caller
accepts `text/event-stream`, or length-delimited messages for `application/x-protobuf`. When it
breaks off in the middle, its last line is the problem document.
"""

from __future__ import annotations

import io
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pydantic_core
from google.protobuf.proto import serialize_length_prefixed

from dialoop_services.rest.guard import send_problem
from dialoop_services.rest.problems import problem_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.errors import DialoopError
    from google.protobuf.message import Message

    from dialoop_services.rest.guard import Send
    from dialoop_services.rest.schema import Encoder

_PROTOBUF = b"application/x-protobuf"


class Format(Enum):
    """How answers are written; the value is the media type."""

    JSON = b"application/json"
    PROTOBUF = _PROTOBUF
    LINES = b"application/x-ndjson"
    EVENTS = b"text/event-stream"
    DELIMITED = b"application/x-protobuf; delimited=true"

    @classmethod
    def of(cls, headers: Mapping[bytes, bytes], *, is_stream: bool) -> Format:
        """What the caller accepts; without a word of that, what it sends."""
        accepted = headers.get(b"accept", b"*/*").lower()
        if accepted == b"*/*":
            accepted = headers.get(b"content-type", b"").lower()
        if _PROTOBUF in accepted:
            return cls.DELIMITED if is_stream else cls.PROTOBUF
        if not is_stream:
            return cls.JSON
        return cls.EVENTS if cls.EVENTS.value in accepted else cls.LINES


class ResponseWriter:
    """The answer to one request; sends its head when there is something to say."""

    def __init__(self, send: Send, format_: Format, encode: Encoder) -> None:
        self._send = send
        self._format = format_
        self._encode = encode
        self._has_begun = False

    async def whole(self, message: Message, beside: Mapping[str, Any] | None = None) -> None:
        """Answer with one message, and in JSON with what stands beside its fields."""
        body = self._bytes(message, beside or {})
        await self._begin((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.body", "body": body})

    async def part(self, message: Message) -> None:
        """Send one message of a stream."""
        await self._write(self._bytes(message))

    async def end(self) -> None:
        """End a stream."""
        if not self._has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: DialoopError) -> None:
        """Answer with a problem, or end a stream with it."""
        if not self._has_begun:
            await send_problem(self._send, error)
            return
        if self._format in (Format.LINES, Format.EVENTS):
            await self._write(self._framed(problem_body(error), event=b"event: error\n"))
        # Delimited messages have no place for a problem: they end without their last chunk.
        if self._format is not Format.DELIMITED:
            await self.end()

    async def _begin(self, *headers: tuple[bytes, bytes]) -> None:
        self._has_begun = True
        all_headers = [(b"content-type", self._format.value), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": all_headers})

    async def _write(self, chunk: bytes) -> None:
        if not self._has_begun:
            await self._begin((b"cache-control", b"no-store"))
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _bytes(self, message: Message, beside: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        if self._format is Format.PROTOBUF:
            return message.SerializeToString()
        if self._format is Format.DELIMITED:
            written = io.BytesIO()
            serialize_length_prefixed(message, written)
            return written.getvalue()
        encoded = {**self._encode(message), **beside}
        return self._framed(pydantic_core.to_json(encoded, inf_nan_mode="null"))

    def _framed(self, text: bytes, event: bytes = b"") -> bytes:
        if self._format is Format.LINES:
            return text + b"\n"
        return event + b"data: " + text + b"\n\n" if self._format is Format.EVENTS else text
