"""One rpc over HTTP, as an ASGI application: decode, call the servicer's method, encode."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

from dialoop.errors import ERRORS_BY_STATUS, InternalError, InvalidInput, Status
from dialoop.reasons import Reason
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
from dialoop_services.rest.middleware import Body
from dialoop_services.rest.problems import (
    FieldsRefused,
    UnsupportedMediaType,
    fields_refused,
)
from dialoop_services.rest.queries import read_query
from dialoop_services.rest.routes import name_of
from dialoop_services.rest.schema import decode, models
from dialoop_services.runtime.access.principals import while_allowed
from dialoop_services.runtime.access.token_file import scope_of
from dialoop_services.runtime.calls import CallContext
from dialoop_services.runtime.errors import is_not_implemented, not_served

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from dialoop_services.rest.guard import Receive, Scope, Send
    from dialoop_services.rest.middleware import Complete, Middleware, Read
    from dialoop_services.rest.routes import Route
    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.calls import Call, Calls

_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"


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
        middleware: Middleware | None = None,
    ) -> None:
        rpc = route.rpc
        self._route = route
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
        if not self._route.is_stream:
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
        if self._route.reads_query:
            message = self._from_query(scope["query_string"])
        else:
            content = await read_body(caller.receive, headers, self._bodies)
            media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            read = self._reader(media)
            if self._middleware is None:
                message = read(content)
            else:
                body = Body(
                    rpc=self._route.rpc,
                    content=content,
                    query=scope["query_string"],
                    is_json=media != _PROTOBUF,
                    wants_json=Format.of(headers, is_stream=self._route.is_stream) is Format.JSON,
                )
                message, complete = self._middleware.read(body, read)
        for parameter, field in self._route.bindings.items():
            _set_from_path(message, field, scope["path_params"][parameter])
        return message, complete

    def _reader(self, media: bytes) -> Read:
        """Return what reads a body of this type."""
        if media == _PROTOBUF:
            return self._from_protobuf
        if media not in (b"", _JSON) and not media.endswith(b"+json"):
            raise UnsupportedMediaType(
                "This route does not read the body's content-type.",
                remedy="Send application/json or application/x-protobuf.",
            )
        return self._from_json

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
