"""How long each phase of a job took, in wall and CPU seconds of the trainer."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Seconds = dict[str, dict[str, float]]


class PhaseClock:
    """Adds to seconds that somebody else owns and saves: {"train": {"wall_s": 9.5, ...}, ...}."""

    def __init__(self) -> None:
        self._name = ""
        self._wall_s = self._cpu_s = 0.0

    @contextmanager
    def phase(self, name: str, seconds: Seconds) -> Iterator[None]:
        """Count what happens inside as `name`."""
        self._name = name
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        yield
        self.count(seconds)
        self._name = ""

    def count(self, seconds: Seconds) -> None:
        """Add what the running phase took until now, so that a checkpoint has it."""
        if not self._name:
            return
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        entry = seconds.setdefault(self._name, {"wall_s": 0.0, "cpu_s": 0.0})
        entry["wall_s"] += wall_s - self._wall_s
        entry["cpu_s"] += cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
