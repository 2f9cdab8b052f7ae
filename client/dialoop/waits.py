"""What a process waits for at this moment: other services' answers, work, room on a disk.

from dialoop.waits import waiting_for

with waiting_for("replay", "groups to train") as wait:
    wait.restart()              # something came, so that a stall is counted from here on

Each `Channel` counts its calls in flight so. Services show the waits among their metrics, and
`dialoop status` says from them who waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

STALL_S = 20.0
"""Age from which a wait is a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits of one process for the same thing: how many there are, and the oldest one's age.

    target: the service, address or thing ("disk", "learner") that is waited for. what: an rpc's
    name, or what has to come. seconds: age of the oldest of them. is_idle: no work is due, so that
    it is no stall however long it takes.
    """

    target: str
    what: str
    seconds: float
    count: int = 1
    is_idle: bool = False

    @property
    def is_stall(self) -> bool:
        """Return whether the wait is long enough to be told."""
        return not self.is_idle and self.seconds >= STALL_S


class OpenWait:
    """A wait that has not ended; `restart` begins it anew."""

    __slots__ = ("began_at", "is_idle", "target", "what")

    def __init__(self, target: str, what: str, *, is_idle: bool = False) -> None:
        self.target, self.what, self.is_idle = target, what, is_idle
        self.began_at = time.monotonic()

    def restart(self) -> None:
        """Count the wait's seconds from now on, because something has come."""
        self.began_at = time.monotonic()


class Waits:
    """The waits of one process or, where a process has several services, of one service."""

    def __init__(self) -> None:
        self._open: set[OpenWait] = set()

    def begin(self, target: str, what: str, *, is_idle: bool = False) -> OpenWait:
        """Begin a wait that `end` ends."""
        wait = OpenWait(target, what, is_idle=is_idle)
        self._open.add(wait)
        return wait

    def end(self, wait: OpenWait) -> None:
        """End a wait."""
        self._open.discard(wait)

    def current(self) -> list[Wait]:
        """Return the waits by target and what, the oldest first."""
        now = time.monotonic()
        by_kind: dict[tuple[str, str, bool], list[float]] = {}
        for wait in tuple(self._open):
            kind = (wait.target, wait.what, wait.is_idle)
            by_kind.setdefault(kind, []).append(now - wait.began_at)
        waits = [
            Wait(target=target, what=what, is_idle=is_idle, seconds=max(ages), count=len(ages))
            for (target, what, is_idle), ages in by_kind.items()
        ]
        return sorted(waits, key=lambda wait: -wait.seconds)


current_waits: ContextVar[Waits] = ContextVar("current_waits", default=Waits())  # noqa: B039
"""Where waits are counted: for the whole process, unless a service beside others set its own."""


@contextmanager
def waiting_for(target: str, what: str, *, is_idle: bool = False) -> Iterator[OpenWait]:
    """Count what happens in the block as a wait for `target`; `is_idle` where no work is due."""
    waits = current_waits.get()
    wait = waits.begin(target, what, is_idle=is_idle)
    try:
        yield wait
    finally:
        waits.end(wait)
