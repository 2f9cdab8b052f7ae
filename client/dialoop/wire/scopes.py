"""The scopes of tokens, by the names that token files and commands use."""

from __future__ import annotations

from typing import cast

from dialoop.v1 import scope_pb2
from dialoop.v1.scope_pb2 import Scope


def name_of(scope: Scope) -> str:
    """Return the scope's name: SCOPE_QUEUE_APPEND is "queue:append"."""
    return Scope.Name(scope).removeprefix("SCOPE_").lower().replace("_", ":")


SCOPES = {
    name_of(scope): scope
    for scope in cast("list[Scope]", Scope.values())
    if scope != scope_pb2.SCOPE_UNSPECIFIED
}
"""All scopes that a token can have."""
