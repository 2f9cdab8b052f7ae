"""Routes of other protocols than ours, such as OpenAI's. They share the guard and the limits.

    async def models(request: HttpRequest, answer: HttpAnswer) -> None:
        await answer.json({"object": "list", "data": []})

    server.add_route(HttpRoute(name="OpenAI.ListModels", scope=SCOPE_ROLLOUT, handle=models, ...))

A handler answers with one JSON document, or with server-sent events. `errors` turns an error that
it raises into an answer of the protocol's own shape.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic_core
from dialoop.errors import DialoopError
from dialoop.reasons import Reason

from dialoop_services.rest.guard import authorization_of
from dialoop_services.rest.problems import UnsupportedMediaType
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
from dialoop_services.runtime.access.auth import Token, credentials_of
from dialoop_services.runtime.access.principals import current_principal
from dialoop_services.runtime.calls import Call, Calls, while_allowed

if TYPE_CHECKING:
    from dialoop.v1.scope_pb2 import Scope as TokenScope

    from dialoop_services.rest.guard import Receive, Scope, Send

_JSON, _EVENTS = b"application/json", b"text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """The answer to an error: a document, and headers beside content-type and content-length.

    event: the name of the event that ends a stream with it, in protocols that name them.
    """

    document: Mapping[str, Any]
    headers: Mapping[str, str]
    event: str = ""


ToErrorAnswer = Callable[[DialoopError], ErrorAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """One route. OpenAPI, metrics and logs call it by its `name`.

    scope: what a token needs. path: with parameters in braces, as in Starlette. operation: its part
    of the OpenAPI document. admits: whether a bearer token opens the route although it is none of
    the service's, given the path's parameters; None: no other token does.
    """

    name: str
    scope: TokenScope
    method: str
    path: str
    handle: Callable[[HttpRequest, HttpAnswer], Awaitable[None]]
    errors: ToErrorAnswer
    operation: Mapping[str, Any]
    admits: Callable[[Mapping[str, str], bytes], bool] | None = None

    def __post_init__(self) -> None:
        if self.admits is not None and self.own_prefix == "/":
            raise ValueError(f"{self.path} has keys of its own, and no path of its own.")

    @property
    def own_prefix(self) -> str:
        """Return the path up to its first parameter: "/recordings/" of "/recordings/{id}/v1"."""
        return self.path.partition("{")[0]

    def has(self, path: str) -> bool:
        """Return whether a request's path belongs to this route."""
        pattern = re.sub(r"\\\{[^}]+\\\}", "[^/]+", re.escape(self.path))
        return re.fullmatch(pattern, path) is not None


class HttpRequest:
    """A request with its body and path parameters."""

    def __init__(
        self, parameters: Mapping[str, str], body: bytes, caller: Caller, deadline: asyncio.Timeout
    ) -> None:
        self.parameters = parameters
        self.body = body
        self._caller = caller
        self._deadline = deadline

    def why_cancelled(self) -> Reason:
        """Return CALLER_LEFT, DEADLINE_EXCEEDED or STOPPING; call it in `except CancelledError`."""
        if self._caller.is_disconnected:
            return Reason.CALLER_LEFT
        return Reason.DEADLINE_EXCEEDED if self._deadline.expired() else Reason.STOPPING


class HttpAnswer:
    """The answer to one request. Status and headers are sent with the first bytes of the body."""

    def __init__(self, send: Send, errors: ToErrorAnswer) -> None:
        self._send = send
        self._errors = errors
        self._is_started = False

    async def json(self, document: Any) -> None:
        """Answer with one document."""
        await self._send_whole(200, _encode(document), {})

    async def event(self, document: Any, *, name: str = "") -> None:
        """Send one event of a stream, with a name in protocols that name them."""
        if not self._is_started:
            await self._start(200, {b"content-type": _EVENTS, b"cache-control": b"no-store"})
        head = f"event: {name}\n".encode() if name else b""
        await self._send_body(head + b"data: " + _encode(document) + b"\n\n", more=True)

    async def end(self, last: bytes = b"") -> None:
        """End a stream, with the protocol's own last bytes."""
        await self._send_body(last)

    async def fail(self, error: DialoopError) -> None:
        """Answer with an error, or end a stream with it."""
        answer = self._errors(error)
        if self._is_started:
            await self.event(answer.document, name=answer.event)
            await self._send_body(b"")
            return
        await self._send_whole(int(error.http_status), _encode(answer.document), answer.headers)

    async def _send_whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        more = {name.encode(): value.encode() for name, value in headers.items()}
        length = b"%d" % len(body)
        await self._start(status, {b"content-type": _JSON, b"content-length": length} | more)
        await self._send_body(body)

    async def _start(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._is_started = True
        pairs = list(headers.items())
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send_body(self, body: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _encode(document: Any) -> bytes:
    return pydantic_core.to_json(document, inf_nan_mode="null")


class HttpEndpoint:
    """An ASGI application that serves one such route."""

    def __init__(self, route: HttpRoute, *, calls: Calls, token: Token, bodies: BodyLimits) -> None:
        self._route = route
        self._token = token
        self._begin = calls.starter(route.name, "rest")
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        caller, answer = Caller(receive), HttpAnswer(send, self._route.errors)
        call = self._begin()
        await serve_call(call, caller, answer, self._serve(scope, call, caller, answer))

    async def _serve(self, scope: Scope, call: Call, caller: Caller, answer: HttpAnswer) -> None:
        headers = dict(scope["headers"])
        self._require_right(authorization_of(headers), scope["path_params"])
        timeout_s = timeout_of(headers)
        body = await self._read(headers, caller)
        call.set_request(None)
        with caller:
            async with time_limit(timeout_s) as deadline, while_allowed():
                request = HttpRequest(scope["path_params"], body, caller, deadline)
                await self._route.handle(request, answer)

    def _require_right(self, authorization: bytes, parameters: Mapping[str, str]) -> None:
        """Raise what `Token.require` raises, unless the route itself admits what was sent."""
        admits, token = self._route.admits, self._token
        if admits is not None and admits(parameters, credentials_of(authorization)):
            current_principal.set(None)
        elif token.is_set or token.tells_apart(self._route.scope):
            token.require(authorization, self._route.name, self._route.scope)

    async def _read(self, headers: Mapping[bytes, bytes], caller: Caller) -> bytes:
        if self._route.method == "GET":
            return b""
        media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media not in (b"", _JSON):
            raise UnsupportedMediaType(
                "This route does not read the body's content-type.", remedy="Send application/json."
            )
        body = await read_body(caller.receive, headers, self._bodies, self._route.name)
        require_few_values(body, self._bodies.calls.max_items(self._route.name))
        require_unique_keys(body)
        return body
