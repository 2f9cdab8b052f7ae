"""Bearer tokens: every call but a health check must carry a token that may do what it asks for.

The service's own token opens everything. Where there is an admin token, calls of the scope `admin`
need that one. A token file has more tokens, each with some scopes only. Instances of the job carry
tickets, which `tickets` checks.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.errors import PermissionDenied, Unauthenticated
from dialoop.reasons import Reason
from dialoop.v1.scope_pb2 import SCOPE_ADMIN, SCOPE_UNSPECIFIED, Scope
from dialoop.wire.scopes import name_of

from dialoop_services.runtime.access.principals import (
    DIGEST_MARK,
    HOLDER,
    Principal,
    current_principal,
    digest_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop_services.runtime.access.tickets import TicketCheck
    from dialoop_services.runtime.access.token_file import TokenFile


class Token:
    """Token("secret") admits calls with `authorization: Bearer secret`; Token("") admits all.

    The admin token opens everything. Without one, whoever has the token is the admin. Either may be
    given by its digest.
    """

    def __init__(
        self,
        token: str,
        admin_token: str = "",
        scoped: TokenFile | None = None,
        tickets: TicketCheck | None = None,
    ) -> None:
        self._expected = digest_of(token).encode() if token else b""
        self._admin = digest_of(admin_token).encode() if admin_token else b""
        self._scoped = scoped
        self._tickets = tickets

    @property
    def is_set(self) -> bool:
        """Return whether every call needs a token."""
        return bool(self._expected) or self._scoped is not None or self._tickets is not None

    def tells_apart(self, scope: Scope) -> bool:
        """Return whether some who may call at all may not call what needs this scope."""
        has_scopes = self._scoped is not None or self._tickets is not None
        return has_scopes or bool(self._admin and scope == SCOPE_ADMIN)

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
        """Let a call in and note its caller, or refuse it.

        Raise Unauthenticated without a token or with a ticket that is not good, PermissionDenied
        where it lacks the scope: ADMIN_ONLY, SCOPE_MISSING. SCOPE_UNSPECIFIED asks for any token.
        """
        credentials = credentials_of(authorization)
        # Comparing takes the same time whatever was sent, so that nobody can guess step by step.
        digest = (DIGEST_MARK + hashlib.sha256(credentials).hexdigest()).encode()
        if self._admin and hmac.compare_digest(digest, self._admin):
            current_principal.set(HOLDER)
            return
        if self._expected and hmac.compare_digest(digest, self._expected):
            self._require_admin(rpc, scope)
            current_principal.set(HOLDER)
            return
        scopes = None if self._scoped is None else self._scoped.scopes_of(credentials)
        if scopes is not None:
            _require_scope(scopes, rpc, scope)
            current_principal.set(
                Principal(recheck=partial(self.require, authorization, rpc, scope))
            )
            return
        checked = None if self._tickets is None else self._tickets.check(credentials)
        if checked is not None:
            principal, scopes = checked
            _require_scope(scopes, rpc, scope)
            current_principal.set(principal)
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


def _require_scope(scopes: frozenset[Scope], rpc: str, scope: Scope) -> None:
    if scope != SCOPE_UNSPECIFIED and scope not in scopes:
        raise PermissionDenied(
            f"{rpc} needs a token with the scope {name_of(scope)}.",
            reason=Reason.SCOPE_MISSING,
            remedy="Send a token that has the scope, or give it to this one in the "
            "service's token file.",
        )


def credentials_of(authorization: bytes) -> bytes:
    """Return the token of a header; names of schemes are the same in any case."""
    scheme, space, credentials = authorization.partition(b" ")
    return credentials if scheme.lower() == b"bearer" and space else b""
