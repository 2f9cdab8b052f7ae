"""The levels of confinement, and the result of testing one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason


class Level(StrEnum):
    """The levels from strongest to weakest. All filter system calls and limit resources."""

    BUBBLEWRAP = "bubblewrap"
    """Namespaces of its own: a private file system with a /tmp, no device, network or process."""
    LANDLOCK = "landlock"
    """No namespaces: it can read the interpreter's files and write nothing."""
    RLIMITS = "rlimits"
    """Neither namespaces nor Landlock: it opens no file, and imports only preloaded modules."""


AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The level in effect, and the attempts that it denied in the self-test."""

    level: Level
    denies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level} (denies {', '.join(self.denies)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The self-test's result for one level: Assessment(level=..., missing="no bwrap on PATH")."""

    level: Level
    denies: tuple[str, ...] = ()
    # Why the level cannot be used; empty if it can.
    missing: str = ""


def parse_level(name: str) -> Level | None:
    """Return the level with this name, or None for "auto"; InvalidConfig for an unknown name."""
    if name == AUTO:
        return None
    try:
        return Level(name)
    except ValueError:
        raise InvalidConfig(
            f"There is no sandbox level '{name}'.",
            reason=Reason.BAD_SANDBOX_LEVEL,
            remedy=f"Use {', '.join((AUTO, *Level))}.",
        ) from None
