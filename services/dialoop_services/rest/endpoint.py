"""One rpc over HTTP, as an ASGI application: decode, call the servicer's method, encode."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dialoop.errors import ERRORS_BY_STATUS, InternalError, InvalidInput, Status
from dialoop.reasons import Reason
from dialoop_extras.rest.lenient_json import read_leniently
from dialoop_extras.rest.old_field_names import rename_old_fields
from dialoop_extras.rest.padded import Padding, pad_answer, padding_of
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import ValidationError

from dialoop_services.rest.answers import Format, ResponseWriter
from dialoop_services.rest.bodies import BodyLimits, read_body
from dialoop_services.rest.client_disconnect import (
    Caller,
    serve_call,
    time_limit,
    timeout_of,
)
from dialoop_services.rest.problems import (
    FieldsRefused,
    UnsupportedMediaType,
    fields_refused,
)
from dialoop_services.rest.queries import read_query
from dialoop_services.rest.schema import decode, models
from dialoop_services.runtime.access.principals import while_allowed
from dialoop_services.runtime.access.token_file import scope_of
from dialoop_services.runtime.calls import CallContext
from dialoop_services.runtime.errors import is_not_implemented, not_served

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import grpc

    from dialoop_services.rest.guard import Receive, Scope, Send
    from dialoop_services.rest.routes import Route
    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.calls import Call, Calls

_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"


class _ParsedRequest(NamedTuple):
    """A request's message, warnings about how it was read, and the padding it asks for."""

    message: Message
    warnings: Sequence[str] = ()
    padding: Padding | None = None

    def warn_in(self, answer: Any) -> None:
        """Add the warnings to an answer, or to the last answer of a stream."""
        if not self.warnings:
            return
        if "warnings" in answer.DESCRIPTOR.fields_by_name:
            answer.warnings.extend(self.warnings)
        elif answer.HasField("completed"):
            answer.completed.warnings.extend(self.warnings)


class RestContext(CallContext):
    """The context of a call over REST. It shows the servicer no headers."""

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
    ) -> None:
        rpc = route.rpc
        self._route = route
        self._method = method
        self._name = f"{rpc.containing_service.name}.{rpc.name}"
        self._scope = scope_of(rpc.containing_service.full_name, rpc.name)
        self._token = token if token.tells_apart(self._scope) else None
        self._begin = calls.starter(self._name, "rest")
        self._bodies = bodies
        self._kind = GetMessageClass(rpc.input_type)
        elsewhere = frozenset(route.bindings.values())
        self._model = models().model(rpc.input_type, elsewhere)
        self._read_json = models().reader(rpc.input_type, elsewhere)
        self._encode = models().encoder(rpc.output_type)
        self._can_warn = not {"warnings", "completed"}.isdisjoint(rpc.output_type.fields_by_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = dict(scope["headers"])
        caller = Caller(receive)
        answer = ResponseWriter(
            send, Format.of(headers, is_stream=self._route.is_stream), self._encode
        )
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
            self._token.require(headers.get(b"authorization", b""), self._name, self._scope)
        request = await self._read(scope, headers, caller)
        call.set_request(request.message)
        with caller:
            if timeout_s is None:
                await self._answer(request, answer)
                return
            async with time_limit(timeout_s):
                await self._answer(request, answer)

    async def _answer(self, request: _ParsedRequest, answer: ResponseWriter) -> None:
        async with while_allowed():
            await self._call(request, answer)

    async def _call(self, request: _ParsedRequest, answer: ResponseWriter) -> None:
        context = RestContext()
        try:
            called = self._method(request.message, context)
        except NotImplementedError as error:
            if is_not_implemented(error, context):
                raise not_served(self._name) from None
            raise
        if not self._route.is_stream:
            message = await called
            request.warn_in(message)
            if request.padding is None:
                await answer.send(message)
                return
            extra = pad_answer(self._name, request.message, message, request.padding)
            await answer.send(message, extra)
            return
        async with aclosing(called):
            async for message in called:
                request.warn_in(message)
                await answer.send_part(message)
        await answer.end()

    async def _read(
        self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller
    ) -> _ParsedRequest:
        if self._route.reads_query:
            request = _ParsedRequest(self._from_query(scope["query_string"]))
        else:
            padding = self._padding(scope["query_string"], headers)
            body = await read_body(caller.receive, headers, self._bodies)
            request = self._from_body(body, headers.get(b"content-type", b""))
            if padding is not None:
                request = request._replace(padding=padding)
        for parameter, field in self._route.bindings.items():
            _set_from_path(request.message, field, scope["path_params"][parameter])
        return request

    def _padding(self, query: bytes, headers: Mapping[bytes, bytes]) -> Padding | None:
        if not query:
            return None
        is_json = Format.of(headers, is_stream=self._route.is_stream) is Format.JSON
        return padding_of(self._name, query, is_json=is_json)

    def _from_body(self, body: bytes, content_type: bytes) -> _ParsedRequest:
        media = content_type.partition(b";")[0].strip().lower()
        if media == _PROTOBUF:
            return _ParsedRequest(self._from_protobuf(body))
        if media not in (b"", _JSON) and not media.endswith(b"+json"):
            raise UnsupportedMediaType(
                "This route does not read the body's content-type.",
                remedy="Send application/json or application/x-protobuf.",
            )
        body = rename_old_fields(self._name, body)
        try:
            return _ParsedRequest(self._from_json(body))
        except FieldsRefused:
            # Only rejected bodies are read a second time, so that valid ones cost nothing more.
            lenient = read_leniently(body, self._route.rpc.input_type) if self._can_warn else None
            if lenient is None:
                raise
        body, warnings = lenient
        return _ParsedRequest(self._from_json(body), warnings)

    def _from_json(self, body: bytes) -> Message:
        try:
            return self._read_json(body or b"{}")
        except ValidationError as error:
            raise fields_refused(error, where="body") from None

    def _from_protobuf(self, body: bytes) -> Message:
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
