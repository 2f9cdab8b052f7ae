"""Run `dialoop token`: make a secret, and print the lines that let it in at a service."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput
from dialoop.wire.scopes import SCOPES

from dialoop_ops.cli.console import say, say_json

if TYPE_CHECKING:
    import argparse

_SECRET_BYTES = 32


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
