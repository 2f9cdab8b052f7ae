"""How well code is kept in: the levels, and what each of them denies.

isolation = effective_isolation("auto")
isolation.level                # Level.LANDLOCK
isolation.denies               # ("network", "processes", ...), each of them tried at start-up
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dialoop.errors import InvalidConfig, Unavailable


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
            reason="BAD_SANDBOX_LEVEL",
            remedy=f"Use {', '.join((AUTO, *Level))}.",
        ) from None


def effective_isolation(name: str = AUTO) -> Isolation:
    """The named level, or the best there is, after a self-test that tries to break out.

    Unavailable (SANDBOX_LEVEL_MISSING) when it fails: a level is never replaced by a weaker one.
    The first call takes some 0.2 s and waits for it.
    """
    from dialoop.sandbox.self_test import assess  # it starts a sandbox, which needs this module

    wanted = parse_level(name)
    found: list[Assessment] = []
    for level in Level if wanted is None else (wanted,):
        assessment = assess(level)
        if not assessment.missing:
            return Isolation(level=level, denies=assessment.denies)
        found.append(assessment)
    reasons = "; ".join(f"{a.level}: {a.missing}" for a in found)
    raise Unavailable(
        f"This machine has no sandbox of the level '{name}' ({reasons}).",
        reason="SANDBOX_LEVEL_MISSING",
        remedy="Install bubblewrap or allow user namespaces, run a kernel with Landlock and "
        "seccomp, or configure a level that this machine has.",
    )
