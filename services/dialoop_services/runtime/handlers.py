"""Wrap servicers' methods for gRPC: check the token, add log fields, count calls, map errors.

handlers = Handlers(calls, Token("secret"))
add_EnvironmentServiceServicer_to_server(servicer, handlers)
server = grpc.aio.server(handlers=[handlers, NoSuchMethod()])
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing, suppress
from contextvars import Context
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
from dialoop.errors import DialoopError, InvalidInput
from dialoop.reasons import Reason
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from dialoop_services.runtime.access.principals import Principal, current_principal
from dialoop_services.runtime.access.token_file import scope_of
from dialoop_services.runtime.calls import (
    CallLimits,
    Calls,
    RightEnded,
    off_loop,
    while_allowed,
)
from dialoop_services.runtime.errors import is_not_implemented, not_served, public_error, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from dialoop.v1.scope_pb2 import Scope

    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.fleet import Incarnation

    Handler = grpc.RpcMethodHandler[Any, Any]
    CallOfGrpc = grpc.aio.ServicerContext[Any, Any]
    UnreadAnswer = Callable[[Any, CallOfGrpc], Awaitable[Any]]

_OURS = "dialoop."
_DRAIN_S = 1.0
# How long nothing is said to those without a right. A call that is reset meanwhile, as in a flood,
# ends without an answer. Of each that is begun and cannot be sent grpcio keeps some hundred bytes
# (grpc/grpc#43360).
_UNTIL_REFUSED_S = 0.01
_ELSEWHERE = {
    "RegistryService.ListMembers": "Call RegistryService.ListInstances.",
    "RegistryService.WatchMembers": "Call RegistryService.WatchInstances.",
    "EnvironmentService.RunText": "Call RunService.RunText.",
    "EnvironmentService.RunTrial": "Call RunService.RunTrial.",
    "RunService.RunText": "Call an environment service that has dialoop-extras installed.",
    "RunService.RunTrial": "Call an environment service that has dialoop-extras installed.",
}
"""What to do instead of a rpc that went, or that a package brings."""
_MAKE: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class Handlers(grpc.GenericRpcHandler):
    """Collects the methods that a generated `add_..._to_server` registers, and admits calls."""

    def __init__(
        self,
        calls: Calls,
        token: Token,
        *,
        limits: CallLimits | None = None,
        incarnation: Incarnation | None = None,
        unread: Mapping[str, UnreadAnswer] = MappingProxyType({}),
    ) -> None:
        """Prepare; `unread` answers callers without a right, by path, with nothing of them read."""
        self._calls = calls
        self._token = token
        self._limits = limits or CallLimits()
        self._incarnation = incarnation
        self._unread = unread
        self._methods: dict[str, _Method] = {}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Do nothing: the same methods are registered by name."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Handler]) -> None:
        """Take the methods of one service."""
        for name, handler in methods.items():
            rpc = f"{service.rpartition('.')[2]}.{name}"
            is_ours = service.startswith(_OURS)  # calls of reflection are not counted
            self._methods[f"/{service}/{name}"] = _Method(
                rpc,
                handler,
                begin=self._calls.starter(rpc, "grpc") if is_ours else _Unobserved,
                has_mark=is_ours and handler.request_streaming,
                admit=partial(self._admit, rpc, scope_of(service, name)),
                limits=self._limits,
                unread=self._unread.get(f"/{service}/{name}"),
            )

    @property
    def max_bytes(self) -> int:
        """Return the bytes of the longest message that any of the methods takes."""
        return max(method.max_bytes for method in self._methods.values())

    def also_as(self, service: str, name: str) -> None:
        """Serve the methods of a service that is known by another name too."""
        for path, method in list(self._methods.items()):
            if path.startswith(f"/{service}/"):
                self._methods[path.replace(service, name, 1)] = method

    def _admit(self, rpc: str, scope: Scope, metadata: Any) -> Principal | None:
        """Return who makes a call; raise what refuses it."""
        self._token.require_in(metadata, rpc, scope)
        if self._incarnation is not None:
            self._incarnation.require_in(metadata)
        return current_principal.get()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return what answers a call; None where there is no such method here.

        gRPC asks before it reads a message, so that nobody without a right has one read.
        """
        method = self._methods.get(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        return None if method is None else method.for_caller(metadata)


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


class _Method:
    """One method, and what its calls have to have."""

    def __init__(  # noqa: PLR0913  # a call's envelope, which is nowhere else
        self,
        rpc: str,
        handler: Any,
        *,
        begin: Callable[[], Observed],
        has_mark: bool,
        admit: Callable[[Any], Principal | None],
        limits: CallLimits,
        unread: UnreadAnswer | None,
    ) -> None:
        kind, make = _MAKE[bool(handler.request_streaming), bool(handler.response_streaming)]
        self._limits, self.max_bytes = limits, limits.max_bytes(rpc)
        self._make = partial(
            make,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )
        self._deserialize = handler.request_deserializer
        self._unread: Handler | None = None
        if unread is not None:
            self._unread = grpc.stream_unary_rpc_method_handler(
                partial(_later, unread), response_serializer=handler.response_serializer
            )
        self._rpc = rpc
        self._function = _writing(getattr(handler, kind))
        self._begin = begin
        self._has_mark = has_mark
        self._admit = admit

    def for_caller(self, metadata: Any) -> Handler:
        """Return what answers the call that has this metadata, or refuses it."""
        try:
            caller = Context().run(self._admit, metadata)
        except DialoopError as error:
            # As a stream, whose messages gRPC leaves to the method to read. Nobody does.
            return self._unread or grpc.stream_stream_rpc_method_handler(
                partial(self._refuse, error)
            )
        return self._make(partial(self._answer, caller))

    async def _refuse(self, error: DialoopError, _: Any, context: CallOfGrpc) -> NoReturn:
        call = self._begin()
        try:
            await asyncio.sleep(_UNTIL_REFUSED_S)
            await _abort(context, _status(error))
        finally:
            call.end(error.status.name)

    async def _answer(self, caller: Principal | None, request: Any, context: CallOfGrpc) -> Any:
        """Run the method; end the call with the status of what it raises."""
        current_principal.set(caller)
        call = self._begin()
        status = "CANCELLED"
        answer = refusal = None
        try:
            answer = await self._called(request, call, context)
            status = "OK"
        except grpc.aio.AbortError:
            status = _status_in(context)
            raise
        except grpc.aio.BaseError:  # the caller has gone, or the server stops
            raise
        except asyncio.CancelledError:
            if not _is_cancelled():  # something that the method waited for was
                await context.abort(grpc.StatusCode.CANCELLED, "The service cancelled the call.")
            raise
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.split(grpc.aio.InternalError)[1] is None:
                raise asyncio.CancelledError from error  # its tasks wrote to a caller who has gone
            is_unwritten = is_not_implemented(error, context)
            refusal = _status(not_served(self._rpc) if is_unwritten else public_error(error))
            status = refusal.code.name
            await _drain(request, error)
        finally:
            call.end(status)
        if refusal is not None:
            # What abort raises and its frames hold each other until Python looks for circles. They
            # hold neither the request nor the error, whose frames have what was decoded.
            del request
            await _abort(context, refusal)
        return answer

    async def _called(self, request: Any, call: Observed, context: CallOfGrpc) -> Any:
        with self._limits.place():
            decoded = await self._decoded(request)
            call.set_request(decoded)
            async with while_allowed():
                return await self._function(decoded, context)

    async def _decoded(self, request: Any) -> Any:
        """Return the request, or the stream of requests; InvalidInput (INVALID_PROTOBUF)."""
        if not hasattr(request, "__aiter__"):
            return await self._message(request)
        messages = self._messages(request)
        return _until_mark(messages, self._rpc) if self._has_mark else messages

    async def _messages(self, parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for part in parts:
            yield await self._message(part)

    async def _message(self, data: bytes) -> Any:
        return await off_loop(len(data), partial(self._decode, data))

    def _decode(self, data: bytes) -> Any:
        if self._deserialize is None:
            return data
        if len(data) > self.max_bytes:
            raise self._limits.too_large(self._rpc)
        kind = self._deserialize.__self__  # a message's class, of which it is FromString
        self._limits.require_few_items(data, kind.DESCRIPTOR, self._rpc)
        try:
            return self._deserialize(data)
        except DecodeError:
            raise InvalidInput(
                f"The bytes are not a serialized request of {self._rpc}.",
                reason=Reason.INVALID_PROTOBUF,
                remedy="Send one message of the type that the protos name.",
            ) from None


def _writing(function: Any) -> Any:
    """Return a method that writes its answers, so that its generator is closed in its call."""
    if not inspect.isasyncgenfunction(function):
        return function

    async def write(request: Any, context: CallOfGrpc) -> None:
        async with aclosing(function(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return write


async def _until_mark(requests: AsyncIterator[Any], rpc: str) -> AsyncIterator[Any]:
    """Yield the messages before the stream's mark; InvalidInput (STREAM_CUT) where it is missing.

    To gRPC a stream that broke off may look as one that has ended.
    """
    num_messages, is_whole = 0, False
    async for message in requests:
        if is_whole:
            raise _stream_cut(f"The stream of {rpc} went on after its mark.")
        if message.HasField("end"):
            is_whole = message.end.num_messages == num_messages
            if not is_whole:
                raise _stream_cut(
                    f"{message.end.num_messages} messages of {rpc} were sent, and {num_messages} "
                    "arrived."
                )
            continue
        num_messages += 1
        yield message
    if not is_whole:
        raise _stream_cut(f"The stream of {rpc} ended without its mark: it was cut off.")


def _stream_cut(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.STREAM_CUT,
        remedy="Send it again, and as its last message one with `end`. A client of an older "
        "Dialoop does not: install the service's version.",
    )


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


async def _later(answer: UnreadAnswer, request: Any, context: CallOfGrpc) -> Any:
    await asyncio.sleep(_UNTIL_REFUSED_S)
    return await answer(request, context)


class NoSuchMethod(grpc.GenericRpcHandler):
    """Refuses the calls that no handlers before it know: the client learns where their rpc is."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Return what refuses a call."""
        rpc = handler_call_details.method.rpartition(".")[2].strip("/").replace("/", ".")
        error = not_served(rpc, remedy=_ELSEWHERE.get(rpc, ""))
        return grpc.stream_unary_rpc_method_handler(partial(_later, partial(_refuse, error)))


async def _refuse(error: DialoopError, _: Any, context: CallOfGrpc) -> NoReturn:
    await _abort(context, _status(error))


def _status(error: DialoopError) -> grpc.Status:
    status: grpc.Status = rpc_status.to_status(status_of(error))
    return status


async def _abort(context: CallOfGrpc, status: grpc.Status) -> NoReturn:
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))
    raise asyncio.CancelledError  # unreachable: abort always raises


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _status_in(context: CallOfGrpc) -> str:
    """Return the name of the status that a method has set by `context.abort`."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return names.get(code, "UNKNOWN")
