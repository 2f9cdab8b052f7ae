"""One rpc over HTTP: decode, call the servicer's method, encode; an ASGI application."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from dialoop.errors import ERRORS_BY_STATUS, InternalError, InvalidInput, Status
from dialoop.reasons import Reason
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import ValidationError

from dialoop_services.rest.answers import Format, ResponseWriter
from dialoop_services.rest.bodies import read_body
from dialoop_services.rest.client_disconnect import Caller, serve_call, time_limit, timeout_of
from dialoop_services.rest.lenient_json import reread
from dialoop_services.rest.old_field_names import modern
from dialoop_services.rest.padded import Padding, padded, padding_of
from dialoop_services.rest.problems import (
    FieldsRefused,
    UnsupportedMediaType,
    fields_refused,
)
from dialoop_services.rest.queries import pairs_of
from dialoop_services.rest.schema import decode, models
from dialoop_services.runtime.calls import CallContext
from dialoop_services.runtime.errors import is_not_written, not_served

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import grpc

    from dialoop_services.rest.guard import Receive, Scope, Send
    from dialoop_services.rest.routes import Route
    from dialoop_services.runtime.calls import Call, Calls

_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, and what the answer says of how it was read."""

    request: Message
    warnings: Sequence[str] = ()
    padding: Padding | None = None

    def warn_in(self, answer: Any) -> None:
        """Add the warnings to an answer, or to the last one of a stream."""
        if not self.warnings:
            return
        if "warnings" in answer.DESCRIPTOR.fields_by_name:
            answer.warnings.extend(self.warnings)
        elif answer.HasField("completed"):
            answer.completed.warnings.extend(self.warnings)


class RestContext(CallContext):
    """The context of a call over REST, whose headers are no business of the servicer."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with the error of that status; the trailing metadata are gRPC's own."""
        number = code.value[0]
        is_ours = number in set(Status)
        raise (ERRORS_BY_STATUS[Status(number)] if is_ours else InternalError)(details)


class Endpoint:
    """Serves one route."""

    def __init__(self, route: Route, method: Any, *, calls: Calls, max_body_bytes: int) -> None:
        rpc = route.rpc
        self._route = route
        self._method = method
        self._name = f"{rpc.containing_service.name}.{rpc.name}"
        self._begin = calls.beginning(self._name, "rest")
        self._max_body_bytes = max_body_bytes
        self._kind = GetMessageClass(rpc.input_type)
        self._model = models().model(rpc.input_type, frozenset(route.bindings.values()))
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
        await serve_call(call, caller, answer, self._serve(scope, headers, call, caller, answer))

    async def _serve(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        call: Call,
        caller: Caller,
        answer: ResponseWriter,
    ) -> None:
        timeout_s = timeout_of(headers)
        asked = await self._read(scope, headers, caller)
        call.asks(asked.request)
        with caller:
            async with time_limit(timeout_s):
                await self._answer(asked, answer)

    async def _answer(self, asked: _Asked, answer: ResponseWriter) -> None:
        context = RestContext()
        try:
            called = self._method(asked.request, context)
        except NotImplementedError as error:
            if is_not_written(error, context):
                raise not_served(self._name) from None
            raise
        if not self._route.is_stream:
            message = await called
            asked.warn_in(message)
            if asked.padding is None:
                await answer.whole(message)
                return
            beside = padded(self._name, asked.request, message, asked.padding)
            await answer.whole(message, beside)
            return
        async for message in called:
            asked.warn_in(message)
            await answer.part(message)
        await answer.end()

    async def _read(self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller) -> _Asked:
        if self._route.reads_query:
            asked = _Asked(self._from_query(scope["query_string"]))
        else:
            padding = self._padding(scope["query_string"], headers)
            body = await read_body(caller.receive, headers, self._max_body_bytes)
            asked = self._from_body(body, headers.get(b"content-type", b""))
            asked = replace(asked, padding=padding)
        for parameter, field in self._route.bindings.items():
            _bind(asked.request, field, scope["path_params"][parameter])
        return asked

    def _padding(self, query: bytes, headers: Mapping[bytes, bytes]) -> Padding | None:
        if not query:
            return None
        is_json = Format.of(headers, is_stream=self._route.is_stream) is Format.JSON
        return padding_of(self._name, query, is_json=is_json)

    def _from_body(self, body: bytes, content_type: bytes) -> _Asked:
        media = content_type.partition(b";")[0].strip().lower()
        if media == _PROTOBUF:
            return _Asked(self._from_protobuf(body))
        if media not in (b"", _JSON) and not media.endswith(b"+json"):
            raise UnsupportedMediaType(
                "The body's content-type is not read here.",
                remedy="Send application/json or application/x-protobuf.",
            )
        body = modern(self._name, body)
        try:
            return _Asked(self._from_json(body))
        except FieldsRefused:
            # Only what is refused is looked at again: a right body costs nothing more.
            found = reread(body, self._route.rpc.input_type) if self._can_warn else None
            if found is None:
                raise
        body, warnings = found
        return _Asked(self._from_json(body), warnings)

    def _from_json(self, body: bytes) -> Message:
        try:
            return decode(self._model.model_validate_json(body or b"{}"), self._kind)
        except ValidationError as error:
            raise fields_refused(error, where="body") from None

    def _from_protobuf(self, body: bytes) -> Message:
        try:
            return self._kind.FromString(body)
        except DecodeError as error:
            raise InvalidInput(
                f"The body is no {self._route.rpc.input_type.name}.",
                reason=Reason.INVALID_PROTOBUF,
                remedy="Send one serialized message.",
            ) from error

    def _from_query(self, query: bytes) -> Message:
        pairs = pairs_of(query)
        try:
            return decode(self._model.model_validate_strings(pairs), self._kind)
        except ValidationError as error:
            raise fields_refused(error, where="query") from None


def _bind(request: Message, path: str, value: str) -> None:
    """Set the field that the URL's path names; a body that says otherwise is refused."""
    *inside, name = path.split(".")
    for outer in inside:
        request = getattr(request, outer)
    if getattr(request, name) not in ("", value):
        raise FieldsRefused(
            f"{path} in the body is not the one in the path.",
            reason=Reason.PATH_MISMATCH,
            remedy="Leave it out of the body.",
            fields=[path],
        )
    setattr(request, name, value)
