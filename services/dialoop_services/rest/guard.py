"""Let callers of REST in: those with the bearer token, and no web page of another origin.

A WebSocket may carry the token as the password of its URL (Basic), ws://any:TOKEN@host, because
some of its clients cannot set headers.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidInput
from dialoop.reasons import Reason

from dialoop_services.rest.problems import ForeignCaller, VersionNotServed, problem_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dialoop_services.runtime.access.auth import Token

    Scope = dict[str, Any]
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]
    Refuse = Callable[[Scope, Send, DialoopError], Awaitable[None]]

HEALTH = frozenset({"/healthz", "/readyz"})
# Open without a token: a browser cannot send one when it opens a page. They contain no data.
DOCUMENTS = frozenset({"/", "/docs", "/openapi.json"})
ASSETS = "/docs/assets/"
_VERSIONS = ("1.0", "1.1")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
# RFC 9110: uri-host [":" port]. An empty name is what HTTP/1.0 sends.
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]*))(?::\d{0,5})?")
POLICY_VIOLATION = 1008
"""Close code of a WebSocket that the caller may not open."""


class Guard:
    """An ASGI application around another that lets only allowed requests in.

    `refuse` answers the others, by default with problem documents. Paths that begin with `assets`
    are open without a token. Those that begin with one of `own_keys` check tokens themselves, since
    they have keys of their own.
    """

    def __init__(
        self,
        app: App,
        token: Token,
        refuse: Refuse | None = None,
        *,
        assets: str = ASSETS,
        own_keys: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._open = (assets, *own_keys)
        self._refuse = refuse or _send_problem
        self._token = token
        self._needs_token = token.is_set

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a problem."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # HTTP 403
        else:
            await self._refuse(scope, send, refusal)

    def _refusal(self, scope: Scope) -> DialoopError | None:
        headers = dict(scope["headers"])
        if self._needs_token:
            refusal = self._refusal_with_token(scope, headers)
        else:
            refusal = _foreign_host(headers)
        return refusal or _malformed(scope) or _foreign_origin(scope, headers)

    def _refusal_with_token(
        self, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> DialoopError | None:
        path = scope["path"]
        if path in HEALTH or path in DOCUMENTS or path.startswith(self._open):
            return None
        authorization = authorization_of(headers)
        if scope["type"] == "websocket":
            authorization = bearer_of(authorization)
        try:
            self._token.require(authorization)
        except DialoopError as error:
            return error
        return None


def _malformed(scope: Scope) -> DialoopError | None:
    """Return what RFC 9112 has refused in a head: other versions, and not exactly one Host."""
    version = scope["http_version"]
    if version not in _VERSIONS:
        return VersionNotServed(
            f"The request is of HTTP/{version}.", remedy="Speak HTTP/1.1; gRPC has its own port."
        )
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        return InvalidInput(
            f"The request has {len(hosts)} headers Host.",
            reason=Reason.INVALID_HTTP,
            remedy="Send one, with the name and the port of this service.",
        )
    if hosts and _HOST.fullmatch(hosts[0].decode("latin-1")) is None:
        return InvalidInput(
            "The header Host is no name with a port.",
            reason=Reason.INVALID_HTTP,
            remedy="Send the name and the port of this service.",
        )
    return None


def authorization_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the authorization header, or x-api-key as one: clients of some wires send that."""
    key = headers.get(b"x-api-key", b"")
    return headers.get(b"authorization", b"Bearer " + key if key else b"")


def bearer_of(authorization: bytes) -> bytes:
    """Return the header as a bearer token; the password of Basic credentials is the token."""
    kind, _, credentials = authorization.partition(b" ")
    if kind.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _foreign_origin(scope: Scope, headers: Mapping[bytes, bytes]) -> ForeignCaller | None:
    """Return an error where a page of another origin makes a browser change something here."""
    origin = headers.get(b"origin")
    if origin is None or scope.get("method") in _READS:
        return None
    if origin.partition(b"://")[2] == headers.get(b"host"):
        return None
    return ForeignCaller(
        "A web page of another origin may not change anything here.",
        remedy="Call from a program, or from a page that this address serves.",
    )


def _foreign_host(headers: Mapping[bytes, bytes]) -> ForeignCaller | None:
    """Return an error where the host name is not one of loopback.

    Somebody can point a name of theirs at this machine, so that their page seems to be of our
    origin. With a token this is not checked, because such a page does not know the token.
    """
    match = _HOST.fullmatch(headers.get(b"host", b"").decode("latin-1"))
    if match is not None:
        name = (match["ipv6"] or match["name"]).lower().removesuffix(".")
        if name in ("", "localhost") or _is_loopback(name):
            return None
    return ForeignCaller(
        "Without a token this service answers on loopback names only.",
        reason=Reason.FOREIGN_HOST,
        remedy="Call 127.0.0.1 or localhost, or set DIALOOP_TOKEN.",
    )


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _send_problem(_: Scope, send: Send, error: DialoopError) -> None:
    await send_problem(send, error)


async def send_problem(
    send: Send, error: DialoopError, *, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Answer with an error's problem document."""
    status, own, body = problem_answer(error)
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
