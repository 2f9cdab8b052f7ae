"""The leases that the trainer holds: extended until a checkpoint contains their groups."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from dialoop.clients.replay import ReplayClient

log = logging.getLogger(__name__)

WORKER = "trainer"
"""Name under which a trainer leases; by it the run's next process takes the leases over."""


class HeldLeases:
    """Leases of groups that are trained or wait for it, extended also during long train steps."""

    def __init__(self, run: str, replay: ReplayClient, *, lease_s: float) -> None:
        self._run = run
        self._replay = replay
        self._lease_s = lease_s
        self._held: set[str] = set()

    def hold(self, lease_ids: Iterable[str]) -> None:
        """Add these leases to those that are extended."""
        self._held.update(lease_ids)

    def release(self, lease_ids: Iterable[str]) -> None:
        """Stop extending these leases."""
        self._held.difference_update(lease_ids)

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Return the leases that are held."""
        return tuple(sorted(self._held))

    @asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        """Extend the held leases regularly, inside the context."""
        async with asyncio.TaskGroup() as tasks:
            extending = tasks.create_task(self._extend_forever())
            yield
            extending.cancel()

    async def extend(self) -> None:
        """Extend the held leases, and release lost ones; only warn if the queue does not answer.

        An expired lease is the trainer's again if no other worker took its group meanwhile.
        """
        if not self._held:
            return
        try:
            lost = await self._replay.extend(self._run, self.lease_ids, lease_s=self._lease_s)
        except DialoopError as error:
            log.warning("Leases are not extended.", extra={"reason": error.reason})
            return
        if lost:
            log.warning("Leases were lost.", extra={"num_leases": len(lost)})
        self.release(lost)

    async def _extend_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self.extend()
