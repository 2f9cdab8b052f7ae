"""Addresses that a service listens on: safe, free, and named when they are not."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from dialoop_services.runtime.settings import ServerSettings


def require_safe_address(settings: ServerSettings) -> None:
    """Refuse to listen beyond loopback without a token (TOKEN_REQUIRED)."""
    if settings.token.get_secret_value() or is_loopback(settings.host):
        return
    raise InvalidConfig(
        f"Listening on {settings.host} without a token would let anyone on the network in.",
        reason=Reason.TOKEN_REQUIRED,
        remedy="Set DIALOOP_TOKEN, or listen on 127.0.0.1.",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name counts as reachable, unless `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, or InvalidConfig (PORT_TAKEN, CANNOT_LISTEN)."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        # Named, since asyncio sets TCP_NODELAY only on sockets that say they are TCP: without it
        # the body of each answer waits 40 ms for the acknowledgement of its head.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise InvalidConfig(
            f"Port {port} on {host} is taken."
            if taken
            else f"Cannot listen on {address_of(host, port)}: {error.strerror}.",
            reason=Reason.PORT_TAKEN if taken else Reason.CANNOT_LISTEN,
            remedy="Choose another port, or 0 for any free one." if taken else "Change host.",
        ) from error
    return bound
