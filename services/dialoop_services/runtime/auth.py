"""Bearer tokens: every call but a health check carries the one that the service was given."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from dialoop.errors import Unauthenticated

if TYPE_CHECKING:
    import grpc


class Token:
    """Token("secret") lets in who sends `authorization: Bearer secret`; Token("") everybody."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    def require_in(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Unauthenticated unless the call's metadata carries it."""
        if not self._expected:
            return
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        # Constant time, so that answers do not tell how much of a guess was right.
        if not hmac.compare_digest(str(given).encode(), self._expected):
            raise Unauthenticated(
                "The bearer token is missing or wrong.",
                remedy="Send the metadata `authorization: Bearer <DIALOOP_TOKEN>`.",
            )
