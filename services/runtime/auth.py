"""Bearer tokens: every call but a health check carries the one that the service was given."""

from __future__ import annotations

import hmac
import inspect
from typing import TYPE_CHECKING, Any

import grpc
from dialoop.errors import Unauthenticated

from services.runtime.errors import wrapped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from services.runtime.errors import Context, Handler

_HEALTH = "/grpc.health.v1.Health/"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose `authorization` is not `Bearer <token>`; inside ErrorInterceptor."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Let the call pass, or answer UNAUTHENTICATED in its stead."""
        handler = await continuation(handler_call_details)
        if handler is None or self._may_pass(handler_call_details):
            return handler
        return wrapped(handler, _refusing)

    def _may_pass(self, details: grpc.HandlerCallDetails) -> bool:
        if details.method.startswith(_HEALTH):
            return True
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        # Constant time, so that answers do not tell how much of a guess was right.
        return hmac.compare_digest(str(given).encode(), self._expected)


def _refusing(function: Any) -> Any:
    refusal = "The bearer token is missing or wrong."
    remedy = "Send the metadata `authorization: Bearer <DIALOOP_TOKEN>`."
    if inspect.isasyncgenfunction(function):

        async def stream(_request: Any, _context: Context) -> AsyncIterator[Any]:
            raise Unauthenticated(refusal, remedy=remedy)
            yield  # makes this a stream

        return stream

    async def call(_request: Any, _context: Context) -> Any:
        raise Unauthenticated(refusal, remedy=remedy)

    return call
