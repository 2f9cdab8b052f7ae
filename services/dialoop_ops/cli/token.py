"""Run `dialoop token` and `dialoop ticket`: what lets a caller, or an instance of a job, in."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets
import sys

from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.wire.scopes import SCOPES

from dialoop_ops.cli.console import say, say_json

_SECRET_BYTES = 32
_DAY_S = 24 * 3600.0


def token(arguments: argparse.Namespace) -> int:
    """Print a new secret and its table; nobody can print the secret again."""
    if unknown := sorted(set(arguments.scope) - SCOPES.keys()):
        raise InvalidInput(
            f"No scope is called {unknown[0]!r}.", remedy=f"Choose among {', '.join(SCOPES)}."
        )
    if re.fullmatch(r"[A-Za-z0-9_-]+", arguments.name) is None:
        raise InvalidInput(
            f"{arguments.name!r} is no name for a token.", remedy="Use letters, digits, - and _."
        )
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    wanted = list(dict.fromkeys(arguments.scope))
    if arguments.json:
        table = {"sha256": digest, "scopes": wanted}
        say_json({"name": arguments.name, "secret": secret, "table": table})
        return 0
    scopes = ", ".join(f'"{scope}"' for scope in wanted)
    say("For the caller, who sets DIALOOP_TOKEN to it:")
    say(f"{secret}\n")
    say("For the file that the service's DIALOOP_TOKEN_FILE names:")
    say(f"[tokens.{arguments.name}]")
    say(f'sha256 = "{digest}"')
    say(f"scopes = [{scopes}]")
    return 0


def ticket(arguments: argparse.Namespace) -> int:
    """Print a ticket for an instance that joins a job."""
    # They import cryptography, which a secret does not need.
    from dialoop_services.runtime.access.principals import TICKET
    from dialoop_services.runtime.access.tickets import ROLE_SCOPES, authority_of

    role, name, days = arguments.role, arguments.name, arguments.days
    if not days > 0:
        raise InvalidInput(f"--days is {days}.", remedy="Give a number above 0.")
    if not name or "/" in name:
        raise InvalidInput(
            f"--name is {name!r}.", remedy="Name the one instance that joins, as gpu-7."
        )
    authority = authority_of(os.environ)
    if authority is None:
        raise InvalidConfig(
            "No token is set, so there is nothing to sign with.",
            reason=Reason.TOKEN_REQUIRED,
            remedy="Set DIALOOP_TOKEN, and DIALOOP_ADMIN_TOKEN if the job has one, as for the "
            "job. A job without a token needs no tickets.",
        )
    signed = authority.issue(run=arguments.run, role=role, name=name, valid_s=days * _DAY_S)
    scopes = ", ".join(ROLE_SCOPES[role]) or "nothing"
    sys.stderr.write(f"{role}/{name} may call others for: {scopes}.\n")
    say(f"{TICKET}={signed.text()}")
    return 0
