"""Servicers' methods as gRPC calls them, each wrapped once: token, log fields, counts, errors.

handlers = Handlers(calls, token="secret")
add_EnvironmentServiceServicer_to_server(servicer, handlers)
handlers.add_to(server)

No interceptors: grpc.aio would build their chain anew for every call.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
from grpc_status import rpc_status

from dialoop_services.runtime.errors import is_not_written, not_served, public_error, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from dialoop.errors import DialoopError

    from dialoop_services.runtime.auth import Token
    from dialoop_services.runtime.calls import Calls

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

_OURS = "dialoop."


class Handlers:
    """Stands in a server's place when a generated `add_..._to_server` registers a servicer."""

    def __init__(self, calls: Calls, token: Token, *, door: str = "grpc") -> None:
        self._calls = calls
        self._token = token
        self._door = door
        self._by_service: dict[str, dict[str, Handler]] = {}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Nothing: the same methods come by name."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Handler]) -> None:
        """Take the methods of one service."""
        self._by_service[service] = {
            name: self._wrapped(service, name, handler) for name, handler in methods.items()
        }

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve all of them."""
        for service, methods in self._by_service.items():
            server.add_registered_method_handlers(service, methods)

    def find(self, path: str) -> Handler | None:
        """The method at `/dialoop.v1.EnvironmentService/Step`."""
        _, _, full_name = path.partition("/")
        service, _, name = full_name.partition("/")
        return self._by_service.get(service, {}).get(name)

    def _wrapped(self, service: str, name: str, handler: Handler) -> Handler:
        kinds = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        kind, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
        rpc = f"{service.rpartition('.')[2]}.{name}"
        is_ours = service.startswith(_OURS)  # reflection is no work of ours
        begin = self._calls.beginning(rpc, self._door) if is_ours else _Unobserved
        made: Handler = make(
            _Envelope(rpc, begin, self._token).around(getattr(handler, kind)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


class Observed(Protocol):
    """A call, or nothing in its place."""

    def asks(self, request: Any) -> None:
        """Its request is known."""

    def end(self, status: str) -> None:
        """It has ended."""


class _Unobserved:
    """Neither counted nor logged."""

    def asks(self, request: Any) -> None:
        """Nothing."""

    def end(self, status: str) -> None:
        """Nothing."""


class _Envelope:
    """What surrounds one method."""

    def __init__(self, rpc: str, begin: Callable[[], Observed], token: Token) -> None:
        self._rpc = rpc
        self._begin = begin
        self._token = token

    def around(self, function: Any) -> Any:
        """The method as gRPC is to call it."""
        # A method that is no generator may stream all the same, by context.write.
        if inspect.isasyncgenfunction(function):
            return self._around_stream(function)
        return self._around_unary(function)

    def _around_unary(self, function: Any) -> Any:
        begin, token = self._begin, self._token

        async def unary(request: Any, context: Context) -> Any:
            call = begin()
            status = "CANCELLED"
            try:
                token.require_in(context)
                call.asks(request)
                answer = await function(request, context)
                status = "OK"
            except grpc.aio.AbortError:
                status = _status_in(context)
                raise
            except Exception as error:
                refusal = self._refusal(context, error)
                status = refusal.status.name
                await _abort(context, refusal)
            finally:
                call.end(status)
            return answer

        return unary

    def _around_stream(self, function: Any) -> Any:
        begin, token = self._begin, self._token

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            call = begin()
            status = "CANCELLED"
            try:
                token.require_in(context)
                call.asks(request)
                async for answer in function(request, context):
                    yield answer
                status = "OK"
            except grpc.aio.AbortError:
                status = _status_in(context)
                raise
            except Exception as error:
                refusal = self._refusal(context, error)
                status = refusal.status.name
                await _abort(context, refusal)
            finally:
                call.end(status)

        return stream

    def _refusal(self, context: Context, error: Exception) -> DialoopError:
        return not_served(self._rpc) if is_not_written(error, context) else public_error(error)


async def _abort(context: Context, error: DialoopError) -> NoReturn:
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))
    raise asyncio.CancelledError  # unreachable: abort always raises


def _status_in(context: Context) -> str:
    """The status that a method of ours has aborted with itself."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {known.value[0]: known.name for known in grpc.StatusCode}
    return names.get(code, "UNKNOWN")
