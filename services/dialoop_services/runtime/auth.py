"""Bearer tokens: every call but a health check must carry the service's token.

A few rpcs change what every caller gets. Where there is an admin token, they need that one.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from dialoop.errors import PermissionDenied, Unauthenticated
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

ADMIN_RPCS = frozenset({"TemplateService.RegisterTemplate"})
"""What only the holder of the admin token may call, where there is one."""


class Token:
    """Token("secret") admits calls with `authorization: Bearer secret`; Token("") admits all.

    The admin token opens everything. Without one, whoever may call is the admin.
    """

    def __init__(self, token: str, admin_token: str = "") -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._admin = f"Bearer {admin_token}".encode() if admin_token else b""

    @property
    def is_set(self) -> bool:
        """Return whether every call needs a token."""
        return bool(self._expected)

    def require_in(self, metadata: Iterable[tuple[str, Any]], rpc: str = "") -> None:
        """Raise what `require` raises, for a call with this metadata."""
        if not self._expected and not (self._admin and rpc in ADMIN_RPCS):
            return
        authorization = next((value for key, value in metadata if key == "authorization"), "")
        self.require(str(authorization).encode(), rpc)

    def require(self, authorization: bytes, rpc: str = "") -> None:
        """Raise Unauthenticated, or PermissionDenied (ADMIN_ONLY) for an rpc of the admin."""
        # Comparing takes the same time whatever was sent, so that nobody can guess step by step.
        authorization = _with_usual_scheme(authorization)
        if self._admin and hmac.compare_digest(authorization, self._admin):
            return
        if self._expected and not hmac.compare_digest(authorization, self._expected):
            raise Unauthenticated(
                "The bearer token is missing or wrong.",
                remedy="Send `authorization: Bearer <DIALOOP_TOKEN>`.",
            )
        if self._admin and rpc in ADMIN_RPCS:
            raise PermissionDenied(
                f"{rpc} needs the admin token.",
                reason=Reason.ADMIN_ONLY,
                remedy="Send `authorization: Bearer <DIALOOP_ADMIN_TOKEN>`.",
            )


def _with_usual_scheme(authorization: bytes) -> bytes:
    """Return the header with `Bearer` as we write it: schemes are the same in any case."""
    scheme, space, credentials = authorization.partition(b" ")
    return b"Bearer " + credentials if scheme.lower() == b"bearer" and space else authorization
