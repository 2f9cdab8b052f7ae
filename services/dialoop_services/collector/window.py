"""How many groups are played at once, where a job leaves that to what the engines have room for.

    window = Window("auto")
    window.saw(queue_s=0.0, took_s=1.5)     # of each answer: seconds in an engine's queue, and all
    window.room(num_playing=3)              # 13 groups may begin

It works as congestion control does for networks (AIMD: Chiu and Jain 1989, with the slow start of
Jacobson 1988). Answers that wait in an engine's queue say that it has more than it can decode, or
has no free cache: fewer groups are begun. A full window without waiting grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

_FIRST, _FEWEST, _MOST = 16, 2, 1024
LOOK_S = 2.0
"""Seconds of answers after which the window may change."""
_QUEUED = 0.2
"""The share of answers' time that may be waiting in a queue."""
_CUT = 0.75


class Window:
    """The number of groups that may be played at once: a fixed one, or as engines have room.

    Without answers that tell of a queue, as where agents call replicas themselves, it stays.
    """

    def __init__(
        self, size: int | Literal["auto"], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_fixed = size != "auto"
        self.size = _FIRST if size == "auto" else size
        self._now = now
        self._doubles = True
        self._begin()

    def _begin(self) -> None:
        self._since = self._now()
        self._queue_s = self._took_s = 0.0

    def saw(self, queue_s: float, took_s: float) -> None:
        """Count an answer: the seconds that it waited in the engine's queue, and took in all."""
        self._queue_s += queue_s
        self._took_s += took_s

    def room(self, num_playing: int) -> int:
        """Return how many groups may begin while so many are played; 0 or less for none."""
        if not self._is_fixed and self._took_s and self._now() - self._since >= LOOK_S:
            if self._queue_s > _QUEUED * self._took_s:
                self._doubles = False
                self.size = max(_FEWEST, int(_CUT * self.size))
            elif num_playing >= self.size:
                self.size = min(_MOST, 2 * self.size if self._doubles else self.size + 1)
            self._begin()
        return self.size - num_playing
