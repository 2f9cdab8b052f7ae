"""Bearer tokens: every call but a health check must carry the service's token."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from dialoop.errors import Unauthenticated

if TYPE_CHECKING:
    import grpc


class Token:
    """Token("secret") admits calls with `authorization: Bearer secret`; Token("") admits all."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    def require_in(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raise Unauthenticated unless the call's metadata have the token."""
        if not self._expected:
            return
        metadata = context.invocation_metadata() or ()
        authorization = next((value for key, value in metadata if key == "authorization"), "")
        # Comparing takes the same time whatever was sent, so that nobody can guess step by step.
        if not hmac.compare_digest(str(authorization).encode(), self._expected):
            raise Unauthenticated(
                "The bearer token is missing or wrong.",
                remedy="Send the metadata `authorization: Bearer <DIALOOP_TOKEN>`.",
            )
