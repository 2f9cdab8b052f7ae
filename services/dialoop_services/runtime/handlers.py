"""Wrap servicers' methods for gRPC: check the token, add log fields, count calls, map errors.

handlers = Handlers(calls, Token("secret"))
add_EnvironmentServiceServicer_to_server(servicer, handlers)
handler = handlers.find("/dialoop.v1.EnvironmentService/Step")

These are no interceptors, because calls inside one process take them too.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from dialoop_services.runtime.access.principals import RightEnded, while_allowed
from dialoop_services.runtime.access.token_file import scope_of
from dialoop_services.runtime.errors import is_not_implemented, not_served, public_error, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from dialoop.errors import DialoopError
    from dialoop.v1.scope_pb2 import Scope

    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.calls import Calls
    from dialoop_services.runtime.fleet import Incarnation

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

_OURS = "dialoop."
_DRAIN_S = 1.0


class Handlers:
    """Collects the methods that a generated `add_..._to_server` registers, in place of a server."""

    def __init__(
        self,
        calls: Calls,
        token: Token,
        *,
        door: str = "grpc",
        incarnation: Incarnation | None = None,
    ) -> None:
        self._calls = calls
        self._token = token
        self._incarnation = incarnation
        self._door = door
        self._by_service: dict[str, dict[str, Handler]] = {}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Do nothing: the same methods are registered by name."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Handler]) -> None:
        """Take the methods of one service."""
        self._by_service[service] = {
            name: self._wrap(service, name, handler) for name, handler in methods.items()
        }

    def find(self, path: str) -> Handler | None:
        """Return the method at a path such as `/dialoop.v1.EnvironmentService/Step`, or None."""
        _, _, full_name = path.partition("/")
        service, _, name = full_name.partition("/")
        return self._by_service.get(service, {}).get(name)

    def _wrap(self, service: str, name: str, handler: Handler) -> Handler:
        kinds = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        kind, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
        rpc = f"{service.rpartition('.')[2]}.{name}"
        is_ours = service.startswith(_OURS)  # calls of reflection are not counted
        begin = self._calls.starter(rpc, self._door) if is_ours else _Unobserved
        made: Handler = make(
            _Envelope(rpc, begin, self._token, scope_of(service, name), self._incarnation).around(
                getattr(handler, kind)
            ),
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return made


class Observed(Protocol):
    """A call that is counted and logged, or `_Unobserved`."""

    def set_request(self, request: Any) -> None:
        """Note the call's request."""

    def end(self, status: str) -> None:
        """Note that the call has ended."""


class _Unobserved:
    """A call that is neither counted nor logged."""

    def set_request(self, request: Any) -> None:
        """Do nothing."""

    def end(self, status: str) -> None:
        """Do nothing."""


class _Envelope:
    """The wrapper of one method."""

    def __init__(
        self,
        rpc: str,
        begin: Callable[[], Observed],
        token: Token,
        scope: Scope,
        incarnation: Incarnation | None,
    ) -> None:
        self._rpc = rpc
        self._begin = begin
        self._token = token
        self._scope = scope
        self._incarnation = incarnation

    def around(self, function: Any) -> Any:
        """Return the method as gRPC calls it."""
        # A method that is not a generator may stream too, with context.write.
        if inspect.isasyncgenfunction(function):
            return self._around_stream(function)
        return self._around_unary(function)

    def _around_unary(self, function: Any) -> Any:
        begin, token, rpc = self._begin, self._token, self._rpc
        scope, incarnation = self._scope, self._incarnation

        async def unary(request: Any, context: Context) -> Any:
            call = begin()
            status = "CANCELLED"
            try:
                metadata = context.invocation_metadata() or ()
                token.require_in(metadata, rpc, scope)
                if incarnation is not None:
                    incarnation.require_in(metadata)
                call.set_request(request)
                async with while_allowed():
                    answer = await function(_require_decoded(request, rpc), context)
                status = "OK"
            except grpc.aio.AbortError:
                status = _status_in(context)
                raise
            except Exception as error:
                refusal = self._refusal(context, error)
                status = refusal.status.name
                await _drain(request, error)
                await _abort(context, refusal)
            finally:
                call.end(status)
            return answer

        return unary

    def _around_stream(self, function: Any) -> Any:
        begin, token, rpc = self._begin, self._token, self._rpc
        scope, incarnation = self._scope, self._incarnation

        async def stream(request: Any, context: Context) -> None:
            call = begin()
            status = "CANCELLED"
            try:
                metadata = context.invocation_metadata() or ()
                token.require_in(metadata, rpc, scope)
                if incarnation is not None:
                    incarnation.require_in(metadata)
                call.set_request(request)
                answers = function(_require_decoded(request, rpc), context)
                async with while_allowed(), aclosing(answers):
                    async for answer in answers:
                        await context.write(answer)
                status = "OK"
            except grpc.aio.AbortError:
                status = _status_in(context)
                raise
            except Exception as error:
                refusal = self._refusal(context, error)
                status = refusal.status.name
                await _drain(request, error)
                await _abort(context, refusal)
            finally:
                call.end(status)

        return stream

    def _refusal(self, context: Context, error: Exception) -> DialoopError:
        if is_not_implemented(error, context):
            return not_served(self._rpc)
        return public_error(error)


class _Undecodable:
    """Stands for bytes that are no message of the method's type."""


_UNDECODABLE = _Undecodable()


def _lenient(deserialize: Any) -> Any:
    """Return the deserializer without its exception, so that the envelope refuses the call."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNDECODABLE

    return decode


def _require_decoded(request: Any, rpc: str) -> Any:
    """Return the request, or the stream of requests; InvalidInput (INVALID_PROTOBUF)."""
    if request is _UNDECODABLE:
        raise InvalidInput(
            f"The bytes are not a serialized request of {rpc}.",
            reason=Reason.INVALID_PROTOBUF,
            remedy="Send one message of the type that the protos name.",
        )
    return _Requests(request, rpc) if hasattr(request, "__aiter__") else request


class _Requests:
    """The decoded messages of a stream; unlike a generator it outlives a cancelled read."""

    def __init__(self, requests: Any, rpc: str) -> None:
        self._requests, self._rpc = aiter(requests), rpc

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _require_decoded(await anext(self._requests), self._rpc)


async def _drain(request: Any, error: Exception) -> None:
    """Read what the caller is still sending, for up to `_DRAIN_S` seconds.

    A grpc.aio client whose send meets the end of its call reports INTERNAL in place of the status.
    A caller whose right has ended is not waited for.
    """
    if hasattr(request, "__aiter__") and not isinstance(error, RightEnded):
        with suppress(Exception):
            async with asyncio.timeout(_DRAIN_S):
                async for _ in request:
                    pass


async def _abort(context: Context, error: DialoopError) -> NoReturn:
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))
    raise asyncio.CancelledError  # unreachable: abort always raises


def _status_in(context: Context) -> str:
    """Return the name of the status that a method has set by `context.abort`."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return names.get(code, "UNKNOWN")
