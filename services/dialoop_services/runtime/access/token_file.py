"""What a token may do: the scope that each rpc needs, and tokens that have some scopes only.

The proto of an rpc names its scope. A file in TOML names tokens by the SHA-256 of their secret, so
that whoever reads the file cannot call anything:

    [tokens.collector-7]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    scopes = ["env", "rollout", "queue:append"]
    expires = 2027-01-01T00:00:00Z      # optional
"""

from __future__ import annotations

import hashlib
import logging
import time
import tomllib
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.v1 import scope_pb2
from dialoop.v1.scope_pb2 import Scope
from dialoop.wire.scopes import SCOPES
from google.protobuf import descriptor_pool
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

log = logging.getLogger(__name__)

# A changed file is read again within this time. Streams look too, and end within a second.
_LOOK_EVERY_S = 0.25
_ANY = scope_pb2.SCOPE_UNSPECIFIED


@cache
def scope_of(service: str, rpc: str) -> Scope:
    """Return the scope of an rpc, given its service's full name.

    Those that are not ours, such as reflection, have SCOPE_UNSPECIFIED: any token will do.
    """
    if not service.startswith("dialoop."):
        return _ANY
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[rpc]
    options = method.GetOptions()
    # The generated stub calls the extension a FieldDescriptor.
    scope: Scope = options.Extensions[scope_pb2.scope]  # type: ignore[index]
    return scope


class _ScopedToken(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    scopes: frozenset[str] = Field(min_length=1)
    expires: datetime | date | None = None

    @field_validator("scopes")
    @classmethod
    def _require_known(cls, scopes: frozenset[str]) -> frozenset[str]:
        if unknown := sorted(scopes - SCOPES.keys()):
            raise ValueError(f"no scope is called {unknown[0]!r}; there are {', '.join(SCOPES)}")
        return scopes

    @property
    def has_expired(self) -> bool:
        """Return whether the token opens nothing any more; a time without a zone is UTC."""
        if self.expires is None:
            return False
        ends = self.expires
        if not isinstance(ends, datetime):
            ends = datetime(ends.year, ends.month, ends.day)
        ends = ends if ends.tzinfo else ends.replace(tzinfo=UTC)
        return datetime.now(UTC) >= ends


class _Tokens(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: dict[str, _ScopedToken]


class TokenFile:
    """The tokens of a file, read again when it changes, so that tokens are replaced in service.

    Raises InvalidConfig (TOKEN_FILE) where it cannot be read at the start. Later a file that cannot
    be read leaves the tokens as they were, and an error in the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stamp_now()
        self._by_digest = _read(path)
        self._looked_at = time.monotonic()

    def scopes_of(self, secret: bytes) -> frozenset[Scope] | None:
        """Return what the token may do; None if there is no such token, or it has expired."""
        self._look()
        token = self._by_digest.get(hashlib.sha256(secret).hexdigest())
        if token is None or token.has_expired:
            return None
        return frozenset(SCOPES[name] for name in token.scopes)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._by_digest = _read(self._path)
        except InvalidConfig as error:
            log.error("The token file changed and cannot be used.", extra={"detail": str(error)})
        else:
            log.info("Tokens were read again.", extra={"num_tokens": len(self._by_digest)})

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> dict[str, _ScopedToken]:
    try:
        with path.open("rb") as file:
            tokens = _Tokens.model_validate(tomllib.load(file)).tokens
    except ValidationError as error:
        raise _unusable(path, _first_of(error)) from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from error
    by_digest = {token.sha256: token for token in tokens.values()}
    if len(by_digest) < len(tokens):
        raise _unusable(path, "two tokens have the same sha256")
    return by_digest


def _first_of(error: ValidationError) -> str:
    detail: Any = error.errors()[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def _unusable(path: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The token file {path} cannot be used: {why}.",
        reason=Reason.TOKEN_FILE,
        remedy="Each table [tokens.NAME] needs `sha256` of the secret and `scopes`; "
        "`dialoop token NAME --scope rollout` prints one.",
    )
