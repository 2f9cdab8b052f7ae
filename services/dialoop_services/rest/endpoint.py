"""One rpc over HTTP, as an ASGI application: decode, call the servicer's method, encode.

A stream is one JSON object per line (`application/x-ndjson`), server-sent events when the caller
accepts `text/event-stream`, or length-delimited messages for `application/x-protobuf`. When it
breaks off, its last line is the problem document.
"""

from __future__ import annotations

import io
from contextlib import aclosing
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import pydantic_core
from dialoop.errors import ERRORS_BY_STATUS, DialoopError, InternalError, InvalidInput, Status
from dialoop.reasons import Reason
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.proto import serialize_length_prefixed
from pydantic import ValidationError

from dialoop_services.rest.guard import authorization_of, send_problem
from dialoop_services.rest.middleware import Body, Complete, Middleware
from dialoop_services.rest.problems import (
    FieldsRefused,
    UnsupportedMediaType,
    fields_refused,
    problem_body,
)
from dialoop_services.rest.queries import read_query
from dialoop_services.rest.requests import (
    BodyLimits,
    Caller,
    read_body,
    require_few_values,
    require_unique_keys,
    serve_call,
    time_limit,
    timeout_of,
)
from dialoop_services.rest.routes import Route, name_of
from dialoop_services.rest.schema import Encoder, decode, models
from dialoop_services.runtime.access.token_file import scope_of
from dialoop_services.runtime.calls import Call, Calls, off_loop, while_allowed
from dialoop_services.runtime.errors import is_not_implemented, not_served

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from dialoop_services.rest.guard import Receive, Scope, Send
    from dialoop_services.runtime.access.auth import Token

_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"


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
        is_json = self._format is Format.JSON
        body = self._json_of(message, extra) if is_json else message.SerializeToString()
        await self._start((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.body", "body": body})

    async def send_part(self, message: Message) -> None:
        """Send one message of a stream."""
        if self._format is Format.DELIMITED:
            buffer = io.BytesIO()
            serialize_length_prefixed(message, buffer)
            await self._write(buffer.getvalue())
        else:
            await self._write(self._frame(self._json_of(message)))

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

    def _json_of(self, message: Message, extra: Mapping[str, Any] | None = None) -> bytes:
        return pydantic_core.to_json(
            {**self._encode(message), **(extra or {})}, inf_nan_mode="null"
        )

    def _frame(self, text: bytes, event: bytes = b"") -> bytes:
        if self._format is Format.LINES:
            return text + b"\n"
        return event + b"data: " + text + b"\n\n" if self._format is Format.EVENTS else text


class RestContext:
    """The part of gRPC's context that servicers may use, for a call over REST; without headers."""

    def __init__(self) -> None:
        self._code: grpc.StatusCode | None = None

    async def send_initial_metadata(self, metadata: tuple[tuple[str, Any], ...]) -> None:
        """Do nothing: the headers of an answer go out with its first bytes."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status; generated classes do so before they raise NotImplementedError."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Do nothing: NotImplementedError gets a text of ours."""

    def code(self) -> grpc.StatusCode | None:
        """Return the status, or None if none was set."""
        return self._code

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """Raise the error of that status; trailing metadata exist in gRPC alone."""
        number = code.value[0]
        is_ours = number in set(Status)
        raise (ERRORS_BY_STATUS[Status(number)] if is_ours else InternalError)(details)


class Endpoint:
    """An ASGI application that serves one route."""

    def __init__(
        self,
        route: Route,
        method: Any,
        *,
        calls: Calls,
        token: Token,
        bodies: BodyLimits,
        middleware: Middleware | None = None,
    ) -> None:
        rpc = route.rpc
        self._route = route
        self._is_stream, self._reads_query = route.is_stream, route.reads_query
        self._method = method
        self._name = name_of(rpc)
        self._scope = scope_of(rpc.containing_service.full_name, rpc.name)
        self._token = token if token.tells_apart(self._scope) else None
        self._begin = calls.starter(self._name, "rest")
        self._bodies = bodies
        self._kind = GetMessageClass(rpc.input_type)
        elsewhere = frozenset(route.bindings.values())
        self._model = models().model(rpc.input_type, elsewhere)
        self._read_json = models().reader(rpc.input_type, elsewhere)
        self._encode = models().encoder(rpc.output_type)
        self._middleware = middleware

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = dict(scope["headers"])
        caller = Caller(receive)
        answer = ResponseWriter(send, Format.of(headers, is_stream=self._is_stream), self._encode)
        call = self._begin()
        serving = self._serve(scope, headers, call, caller, answer)
        await serve_call(call, caller, answer, serving)

    async def _serve(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        call: Call,
        caller: Caller,
        answer: ResponseWriter,
    ) -> None:
        timeout_s = timeout_of(headers)
        if self._token is not None:
            self._token.require(authorization_of(headers), self._name, self._scope)
        request, complete = await self._read(scope, headers, caller)
        call.set_request(request)
        with caller:
            async with time_limit(timeout_s), while_allowed():
                await self._call(request, complete, answer)

    async def _call(
        self, request: Message, complete: Complete | None, answer: ResponseWriter
    ) -> None:
        context = RestContext()
        try:
            called = self._method(request, context)
        except NotImplementedError as error:
            if is_not_implemented(error, context):
                raise not_served(self._name) from None
            raise
        if not self._is_stream:
            message = await called
            await answer.send(message, complete(message) if complete else None)
            return
        async with aclosing(called):
            async for message in called:
                if complete:
                    complete(message)
                await answer.send_part(message)
        await answer.end()

    async def _read(
        self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller
    ) -> tuple[Message, Complete | None]:
        """Return the request, and what its answers need."""
        complete = None
        if self._reads_query:
            message = self._from_query(scope["query_string"])
        else:
            content = await read_body(caller.receive, headers, self._bodies, self._name)
            read = partial(self._from_body, content, headers, scope["query_string"])
            message, complete = await off_loop(len(content), read)
        for parameter, field in self._route.bindings.items():
            _set_from_path(message, field, scope["path_params"][parameter])
        return message, complete

    def _from_body(
        self, content: bytes, headers: Mapping[bytes, bytes], query: bytes
    ) -> tuple[Message, Complete | None]:
        media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media not in (b"", _JSON, _PROTOBUF) and not media.endswith(b"+json"):
            raise UnsupportedMediaType(
                "This route does not read the body's content-type.",
                remedy="Send application/json or application/x-protobuf.",
            )
        read = self._from_protobuf if media == _PROTOBUF else self._from_json
        if self._middleware is None:
            if query:
                raise InvalidInput(
                    "This route reads its body, and no query.",
                    reason=Reason.UNKNOWN_FIELD,
                    remedy="Leave the query out. Padded rows come with dialoop-extras.",
                )
            return read(content), None
        if not query:
            try:
                return read(content), None
            except FieldsRefused:  # only what is refused is read in another way
                pass
        wants_json = Format.of(headers, is_stream=self._is_stream) is Format.JSON
        body = Body(rpc=self._route.rpc, content=content, query=query, wants_json=wants_json)
        return self._middleware.read(body, read)

    def _from_json(self, body: bytes) -> Message:
        require_few_values(body, self._bodies.calls.max_items(self._name))
        require_unique_keys(body)
        try:
            return self._read_json(body or b"{}")
        except ValidationError as error:
            raise fields_refused(error, where="body") from None

    def _from_protobuf(self, body: bytes) -> Message:
        self._bodies.calls.require_few_items(body, self._route.rpc.input_type, self._name)
        try:
            return self._kind.FromString(body)
        except DecodeError as error:
            raise InvalidInput(
                f"The body is not a serialized {self._route.rpc.input_type.name}.",
                reason=Reason.INVALID_PROTOBUF,
                remedy="Send one message of that type, or JSON as application/json.",
            ) from error

    def _from_query(self, query: bytes) -> Message:
        pairs = read_query(query)
        try:
            return decode(self._model.model_validate_strings(pairs), self._kind)
        except ValidationError as error:
            raise fields_refused(error, where="query") from None


def _set_from_path(request: Message, path: str, value: str) -> None:
    """Set the field that the URL's path names. Raise FieldsRefused if the body has another."""
    *inside, name = path.split(".")
    for outer in inside:
        request = getattr(request, outer)
    if getattr(request, name) not in ("", value):
        raise FieldsRefused(
            f"{path} in the body differs from the one in the path.",
            reason=Reason.PATH_MISMATCH,
            remedy="Leave it out of the body.",
            fields=[path],
        )
    setattr(request, name, value)
