"""Bearer tokens: every call but a health check must carry a token that may do what it asks for.

The service's own token opens everything. Where there is an admin token, calls of the scope `admin`
need that one. A token file has more tokens, each with some scopes only.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from dialoop.errors import PermissionDenied, Unauthenticated
from dialoop.reasons import Reason
from dialoop.v1.scope_pb2 import SCOPE_ADMIN, SCOPE_UNSPECIFIED
from dialoop.wire.scopes import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.v1.scope_pb2 import Scope

    from dialoop_services.runtime.access.token_file import TokenFile

_BEARER = b"Bearer "


class Token:
    """Token("secret") admits calls with `authorization: Bearer secret`; Token("") admits all.

    The admin token opens everything. Without one, whoever has the token is the admin.
    """

    def __init__(self, token: str, admin_token: str = "", scoped: TokenFile | None = None) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._admin = f"Bearer {admin_token}".encode() if admin_token else b""
        self._scoped = scoped

    @property
    def is_set(self) -> bool:
        """Return whether every call needs a token."""
        return bool(self._expected) or self._scoped is not None

    def tells_apart(self, scope: Scope) -> bool:
        """Return whether some who may call at all may not call what needs this scope."""
        return self._scoped is not None or bool(self._admin and scope == SCOPE_ADMIN)

    def require_in(
        self,
        metadata: Iterable[tuple[str, Any]],
        rpc: str = "",
        scope: Scope = SCOPE_UNSPECIFIED,
    ) -> None:
        """Raise what `require` raises, for a call with this metadata."""
        if not self.is_set and not self.tells_apart(scope):
            return
        authorization = next((value for key, value in metadata if key == "authorization"), "")
        self.require(str(authorization).encode(), rpc, scope)

    def require(
        self, authorization: bytes, rpc: str = "", scope: Scope = SCOPE_UNSPECIFIED
    ) -> None:
        """Raise Unauthenticated without a token, PermissionDenied where it lacks the scope.

        Reasons: ADMIN_ONLY, SCOPE_MISSING. SCOPE_UNSPECIFIED asks for any token.
        """
        # Comparing takes the same time whatever was sent, so that nobody can guess step by step.
        authorization = _with_usual_scheme(authorization)
        if self._admin and hmac.compare_digest(authorization, self._admin):
            return
        if self._expected and hmac.compare_digest(authorization, self._expected):
            self._require_admin(rpc, scope)
            return
        scopes = None
        if self._scoped is not None and authorization.startswith(_BEARER):
            scopes = self._scoped.scopes_of(authorization.removeprefix(_BEARER))
        if scopes is not None:
            if scope != SCOPE_UNSPECIFIED and scope not in scopes:
                raise PermissionDenied(
                    f"{rpc} needs a token with the scope {name_of(scope)}.",
                    reason=Reason.SCOPE_MISSING,
                    remedy="Send a token that has the scope, or give it to this one in the "
                    "service's token file.",
                )
            return
        if self.is_set:
            raise Unauthenticated(
                "The bearer token is missing or wrong.",
                remedy="Send `authorization: Bearer <DIALOOP_TOKEN>`.",
            )
        self._require_admin(rpc, scope)

    def _require_admin(self, rpc: str, scope: Scope) -> None:
        if self._admin and scope == SCOPE_ADMIN:
            raise PermissionDenied(
                f"{rpc} needs the admin token.",
                reason=Reason.ADMIN_ONLY,
                remedy="Send `authorization: Bearer <DIALOOP_ADMIN_TOKEN>`.",
            )


def _with_usual_scheme(authorization: bytes) -> bytes:
    """Return the header with `Bearer` as we write it: schemes are the same in any case."""
    scheme, space, credentials = authorization.partition(b" ")
    return _BEARER + credentials if scheme.lower() == b"bearer" and space else authorization
