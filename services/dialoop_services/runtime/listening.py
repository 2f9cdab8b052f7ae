"""Check and bind the addresses that a service listens on."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from dialoop_services.runtime.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections a server holds, and the seconds for a request's head."""

    max_connections: int = 2048
    head_s: float = 10.0

    def within_descriptors(self) -> ConnectionLimits:
        """Return the limits with no more connections than this process has descriptors for.

        Two servers share what is left after a reserve for files and for the service's own calls.
        """
        available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if available == resource.RLIM_INFINITY:
            return self
        reserve = min(256, available // 2)
        room = max(1, (available - reserve) // 2)
        return replace(self, max_connections=min(self.max_connections, room))


def require_safe_address(settings: ServerSettings) -> None:
    """Raise InvalidConfig (TOKEN_REQUIRED) for an address beyond loopback without a token."""
    is_guarded = settings.token.get_secret_value() or settings.ticket.get_secret_value()
    if is_guarded or settings.token_file or is_loopback(settings.host):
        return
    raise InvalidConfig(
        f"Listening on {settings.host} without a token would let anyone on the network in.",
        reason=Reason.TOKEN_REQUIRED,
        remedy="Set DIALOOP_TOKEN, or listen on 127.0.0.1.",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach it; of names, `localhost` alone counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; raise InvalidConfig (PORT_TAKEN, CANNOT_LISTEN)."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        # asyncio sets TCP_NODELAY only on sockets whose protocol is TCP. Without it the body of
        # each answer waits 40 ms for the acknowledgement of its head.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        raise InvalidConfig(
            f"Port {port} on {host} is taken."
            if is_in_use
            else f"Cannot listen on {address_of(host, port)}: {error.strerror}.",
            reason=Reason.PORT_TAKEN if is_in_use else Reason.CANNOT_LISTEN,
            remedy="Choose another port, or 0 for any free one." if is_in_use else "Change host.",
        ) from error
    return bound


def require_free_path(path: str) -> None:
    """Raise InvalidConfig (CANNOT_LISTEN) for a socket at which a server listens already."""
    # gRPC would take its place without a word.
    if Path(path).exists():
        raise InvalidConfig(
            f"Two servers are named '{Path(path).name}'.",
            reason=Reason.CANNOT_LISTEN,
            remedy="Name them apart.",
        )


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as its owner allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems say "no limit" and then refuse that number.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
