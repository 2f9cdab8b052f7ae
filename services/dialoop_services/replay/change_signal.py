"""Wakes those who wait for a run to change.

ticket = bell.ticket("my-run")      # before looking, so that no change is missed
...look...
await ticket.wait(timeout_s=1.0)    # until the run changed in this process, or the time is over
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Ticket:
    """The right to be woken by the next change."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class Bell:
    """One event per run, replaced each time it rings."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def ticket(self, run: str) -> Ticket:
        """Stand in line for the run's next change."""
        return Ticket(self._events.setdefault(run, asyncio.Event()))

    def ring(self, run: str) -> None:
        """The run changed: wake everybody who waits for it."""
        event = self._events.pop(run, None)
        if event is not None:
            event.set()

    def ring_all(self) -> None:
        """Wake everybody, whatever they wait for."""
        for run in tuple(self._events):
            self.ring(run)
