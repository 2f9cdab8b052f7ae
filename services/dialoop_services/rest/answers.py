"""Send answers over HTTP: one message, or a stream of them.

A stream is one JSON object per line (`application/x-ndjson`), server-sent events when the caller
accepts `text/event-stream`, or length-delimited messages for `application/x-protobuf`. When it
breaks off, its last line is the problem document.
"""

from __future__ import annotations

import io
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pydantic_core
from google.protobuf.proto import serialize_length_prefixed

from dialoop_services.rest.guard import send_problem
from dialoop_services.rest.problems import WholeAnswer, problem_body

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
        """Return the format the caller accepts, or else the one it sends."""
        accepted, sent = headers.get(b"accept", b"*/*"), headers.get(b"content-type", b"")
        return _format_of(accepted, sent, is_stream=is_stream)


@lru_cache
def _format_of(accepted: bytes, sent: bytes, *, is_stream: bool) -> Format:
    accepted = (sent if accepted == b"*/*" else accepted).lower()
    if _PROTOBUF in accepted:
        return Format.DELIMITED if is_stream else Format.PROTOBUF
    if not is_stream:
        return Format.JSON
    return Format.EVENTS if Format.EVENTS.value in accepted else Format.LINES


class ResponseWriter:
    """The answer to one request. Status and headers are sent with the first bytes of the body."""

    def __init__(self, send: Send, format_: Format, encode: Encoder) -> None:
        self._send = send
        self._format = format_
        self._encode = encode
        self._is_started = False

    async def send(self, message: Message, extra: Mapping[str, Any] | None = None) -> None:
        """Answer with one message; JSON also has the fields of `extra`."""
        status, headers, body = whole_answer(message, self._format, self._encode, extra or {})
        self._is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def send_part(self, message: Message) -> None:
        """Send one message of a stream."""
        if self._format is Format.DELIMITED:
            buffer = io.BytesIO()
            serialize_length_prefixed(message, buffer)
            await self._write(buffer.getvalue())
        else:
            await self._write(self._frame(_json_of(message, self._encode, {})))

    async def end(self) -> None:
        """End a stream."""
        if not self._is_started:
            await self._start()
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: DialoopError) -> None:
        """Answer with a problem, or end a stream with it."""
        if not self._is_started:
            await send_problem(self._send, error)
            return
        if self._format in (Format.LINES, Format.EVENTS):
            await self._write(self._frame(problem_body(error), event=b"event: error\n"))
        # A stream of delimited messages cannot carry a problem: it ends without its last chunk.
        if self._format is not Format.DELIMITED:
            await self.end()

    async def _start(self, *headers: tuple[bytes, bytes]) -> None:
        self._is_started = True
        all_headers = [(b"content-type", self._format.value), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": all_headers})

    async def _write(self, chunk: bytes) -> None:
        if not self._is_started:
            await self._start((b"cache-control", b"no-store"))
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _frame(self, text: bytes, event: bytes = b"") -> bytes:
        if self._format is Format.LINES:
            return text + b"\n"
        return event + b"data: " + text + b"\n\n" if self._format is Format.EVENTS else text


def whole_answer(
    message: Message,
    format_: Format,
    encode: Encoder,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> WholeAnswer:
    """Return the answer of one message as JSON, with the fields of `extra`, or as protobuf."""
    is_json = format_ is Format.JSON
    body = _json_of(message, encode, extra) if is_json else message.SerializeToString()
    headers = [(b"content-type", format_.value), (b"content-length", b"%d" % len(body))]
    return WholeAnswer(200, headers, body)


def _json_of(message: Message, encode: Encoder, extra: Mapping[str, Any]) -> bytes:
    fields = {**encode(message), **extra} if extra else encode(message)
    return pydantic_core.to_json(fields, inf_nan_mode="null")
