"""Errors on the wire: a DialoopError becomes a gRPC status with google.rpc.ErrorInfo.

Anything else becomes INTERNAL with an error_id; its text is in this service's log and nowhere else.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from dialoop.errors import DialoopError, InternalError
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

DOMAIN = "dialoop"
# A status travels in HTTP/2 headers, of which gRPC clients refuse more than 8 KiB by default. The
# message is there twice: percent-encoded (up to three bytes for one) and in the base64 details.
_MAX_BYTES = 1000


class LoggedError(InternalError):
    """An unexpected error as a caller may see it: its id, for who can read the log."""

    def __init__(self, error_id: str) -> None:
        super().__init__(
            f"Internal error {error_id}.", remedy="Look for this error_id in the service's log."
        )
        self.error_id = error_id


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status; outermost, so that it sees everything."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        return None if handler is None else wrapped(handler, _translating)


def wrapped(handler: Handler, around: Callable[[Any], Any]) -> Handler:
    """The same handler with its function replaced by `around(function)`."""
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: Handler = make(
        around(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _translating(function: Any) -> Any:
    if inspect.isasyncgenfunction(function):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for response in function(request, context):
                    yield response
            except Exception as error:
                await _abort(context, error)

        return stream

    async def call(request: Any, context: Context) -> Any:
        try:
            return await function(request, context)
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status = rpc_status.to_status(status_of(public_error(error)))
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))
    raise asyncio.CancelledError  # unreachable: abort always raises


def public_error(error: Exception) -> DialoopError:
    """The error a caller may see; logs the rest under an error_id."""
    if isinstance(error, DialoopError) and not isinstance(error, InternalError):
        return error
    error_id = uuid.uuid4().hex
    log.error("Internal error.", exc_info=error, extra={"error_id": error_id})
    return LoggedError(error_id)


def status_of(error: DialoopError) -> status_pb2.Status:
    """The google.rpc.Status of an error: its message, reason and remedy."""
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={"remedy": _cut(error.remedy)}
        )
    )
    return status_pb2.Status(code=int(error.status), message=_cut(error.message), details=[detail])


def _cut(text: str) -> str:
    """Valid UTF-8 that fits; a lone surrogate becomes a question mark."""
    return text.encode(errors="replace")[:_MAX_BYTES].decode(errors="ignore")
