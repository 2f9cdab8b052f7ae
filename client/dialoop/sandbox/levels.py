"""How well code is kept in: the levels, and what was found of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason


class Level(StrEnum):
    """From the strongest to the weakest; all of them filter system calls and limit resources."""

    BUBBLEWRAP = "bubblewrap"
    """Namespaces of its own: a private file system with a /tmp, no network, no other process."""
    LANDLOCK = "landlock"
    """No namespaces: it reads the interpreter's files and writes nothing."""
    RLIMITS = "rlimits"
    """Neither namespaces nor Landlock: it opens no file at all; imports are those preloaded."""


AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The level in effect and what code at it was seen to be denied."""

    level: Level
    denies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level} (denies {', '.join(self.denies)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What the self-test found of one level: Assessment(level=..., missing="no bwrap on PATH")."""

    level: Level
    denies: tuple[str, ...] = ()
    # Why the level cannot be used; empty when it can.
    missing: str = ""


def parse_level(name: str) -> Level | None:
    """The level of that name, None for "auto"; InvalidConfig for any other."""
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
