"""What a service gets from its host: a server, and channels to other services.

The same service runs in a process of its own (OwnProcess) or in one process with all others, which
call each other over unix sockets.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dialoop.clients.channel import Channel, Credentials
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_services.hosting.server import GrpcServer
from dialoop_services.runtime.access.principals import (
    ADMIN_TOKEN,
    DIGEST_MARK,
    TICKET,
    TOKEN,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.clients.registry import ServiceInstance
    from dialoop.clients.retry import RetryPolicy

    from dialoop_services.runtime.access.tickets import Ticket
    from dialoop_services.runtime.settings import ServerSettings


class Connect(Protocol):
    """Makes channels to other services."""

    def __call__(
        self, address: str, to: str | ServiceInstance, *, retry: RetryPolicy | None = None
    ) -> Channel:
        """Return a channel that the caller closes.

        `to` is the role of the service at an address of the settings, or an instance of the
        registry: another one at its address then refuses the calls.
        """


class Host(Protocol):
    """The surroundings of a service: its server, and the way to other services."""

    @property
    def server(self) -> GrpcServer:
        """Return the service's server, which is not entered yet."""

    @property
    def connect(self) -> Connect:
        """Return the function that makes channels to other services."""

    @property
    def ticket_name(self) -> str:
        """Return the name that the service's ticket binds it to; empty: none."""


class OwnProcess:
    """Hosts one service that has this process to itself.

    It calls others with proofs of its ticket. Without one it sends its token, but to addresses of
    its settings alone: where the registry names some, it signs a ticket for itself with its token,
    which only the job's own token can. InvalidConfig for a ticket of another role or run.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.server = GrpcServer(settings)
        self.connect: Connect = self._connect
        ticket = _ticket_of(settings)
        for name in (TICKET, TOKEN, ADMIN_TOKEN):
            os.environ.pop(name, None)  # programs that the service starts do not inherit them
        self.ticket_name = ticket.instance.name if ticket else ""
        self._credentials_for = _senders(ticket, settings.token.get_secret_value())

    def _connect(
        self, address: str, to: str | ServiceInstance, *, retry: RetryPolicy | None = None
    ) -> Channel:
        audience, epoch = (to, 0) if isinstance(to, str) else (to.audience, to.epoch)
        return Channel(
            address,
            token=self._credentials_for(audience),
            max_message_bytes=self._settings.max_answer_bytes,
            retry=retry,
            epoch=epoch,
        )


def _ticket_of(settings: ServerSettings) -> Ticket | None:
    """Return the ticket of a service, or one that it signs itself; None where it needs none."""
    text, token = settings.ticket.get_secret_value(), settings.token.get_secret_value()
    if not text and not (token and settings.joined_run):
        return None
    from dialoop_services.runtime.access.tickets import Authority, Ticket

    if text:
        ticket = Ticket.of(text)
        ticket.require_for(settings.ROLE, settings.joined_run or settings.of_run)
        return ticket
    authority = Authority.of(token, settings.admin_token.get_secret_value())
    if authority is None:
        raise InvalidConfig(
            "The service has a token's digest, with which it cannot call the instances of its run.",
            reason=Reason.TICKET_MISSING,
            remedy="Set DIALOOP_TICKET to what `dialoop ticket` prints.",
        )
    return authority.issue(run=settings.joined_run, role=settings.ROLE)


def _senders(ticket: Ticket | None, token: str) -> Callable[[str], str | Credentials]:
    """Return what gives the credentials for an audience: proofs of the ticket, or the token.

    With a token's digest alone a service calls without any.
    """
    if ticket is None:
        return lambda _: "" if token.startswith(DIGEST_MARK) else token
    from dialoop_services.runtime.access.tickets import Proofs

    proofs = Proofs(ticket)
    return lambda audience: partial(proofs.to, audience)
