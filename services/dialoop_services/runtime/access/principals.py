"""Who makes a call: the holder of a token, or an instance of the job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from dialoop.errors import PermissionDenied
from dialoop.reasons import Reason

TICKET, TOKEN, ADMIN_TOKEN = "DIALOOP_TICKET", "DIALOOP_TOKEN", "DIALOOP_ADMIN_TOKEN"
"""Variables of an instance's ticket, and of the tokens of all services."""
DIGEST_MARK = "sha256:"
"""Begins a token's digest, which a service of a stack gets in the token's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceName:
    """Which instance of a job somebody is, as a ticket says; without a name, any of that role.

    InstanceName(run="job-1", role="inference", name="gpu-0")
    """

    run: str
    role: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who makes a call: an instance with its ticket, or the holder of a token.

    audience: for which service an instance signed. recheck: raises once the caller's right has
    ended; None where it never does.
    """

    instance: InstanceName | None = None
    audience: str = ""
    recheck: Callable[[], None] | None = None


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Who makes the call that is being served; None where the service asks for no token."""

HOLDER = Principal()
"""Whoever has a token of the services."""


def require_instance(run: str, role: str, name: str) -> None:
    """Let a call be made in an instance's name by that instance alone.

    Raise PermissionDenied: TICKET_MISSING, TICKET_OF_OTHER_MEMBER. Where the service asks for no
    token, anybody may.
    """
    caller = current_principal.get()
    if caller is None:
        return
    remedy = f"Set DIALOOP_TICKET to what `dialoop ticket {role} --run {run} --name {name}` prints."
    if caller.instance is None:
        raise PermissionDenied(
            f"Only an instance of the run with a ticket may speak for {role}/{name}.",
            reason=Reason.TICKET_MISSING,
            remedy=remedy,
        )
    if caller.instance.role != role or caller.instance.name not in ("", name):
        raise PermissionDenied(
            f"The ticket is of {caller.instance.role}/{caller.instance.name or '*'}, and speaks "
            f"for {role}/{name}.",
            reason=Reason.TICKET_OF_OTHER_MEMBER,
            remedy=remedy,
        )


def require_run(run: str) -> None:
    """Raise PermissionDenied (TICKET_OF_OTHER_RUN) for an instance of another run."""
    caller = current_principal.get()
    if caller is not None and caller.instance is not None and caller.instance.run != run:
        raise PermissionDenied(
            f"The ticket is of the run {caller.instance.run!r}, and the call is about {run!r}.",
            reason=Reason.TICKET_OF_OTHER_RUN,
            remedy="Ask about the ticket's own run.",
        )


def digest_of(token: str) -> str:
    """Return what a service needs to know a token again, and cannot call anybody with."""
    if token.startswith(DIGEST_MARK):
        return token
    return DIGEST_MARK + hashlib.sha256(token.encode()).hexdigest()


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process that a stack starts: digests in place of the tokens."""
    digests = {n: digest_of(environment[n]) for n in (TOKEN, ADMIN_TOKEN) if environment.get(n)}
    return {**environment, **digests}
