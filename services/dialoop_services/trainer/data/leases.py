"""The groups the trainer holds: kept from running out until a checkpoint contains them."""

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
"""The name a trainer leases under: the next process of the run has what this one holds."""


class HeldLeases:
    """Leases of groups that are trained or wait to be; extended however long a train step takes."""

    def __init__(self, run: str, replay: ReplayClient, *, lease_s: float) -> None:
        self._run = run
        self._replay = replay
        self._lease_s = lease_s
        self._held: set[str] = set()

    def hold(self, lease_ids: Iterable[str]) -> None:
        """Begin to extend these."""
        self._held.update(lease_ids)

    def let_go(self, lease_ids: Iterable[str]) -> None:
        """No longer extend these."""
        self._held.difference_update(lease_ids)

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """What is held."""
        return tuple(sorted(self._held))

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Extend what is held, for as long as the context lasts."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def extend(self) -> None:
        """Extend what is held, and let go of what is lost; a queue that is away is only a warning.

        Leases that have expired are the trainer's again where nobody took the groups meanwhile.
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
        self.let_go(lost)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self.extend()
