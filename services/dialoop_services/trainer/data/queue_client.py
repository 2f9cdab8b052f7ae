"""The trainer's client of the queue, which tells the queue twice what it may lose, and its leases.

With `appendfsync everysec` Redis comes back from a power loss without its last second. A group
whose acknowledgement was lost would later be dropped as stale, though it is trained. The queue
would not know a policy whose announcement was lost, and take nothing that was sampled from it. Both
are told again once what was told first is on the disk, or is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from dialoop.clients.channel import Channel
from dialoop.clients.replay import ReplayClient
from dialoop.errors import DialoopError
from dialoop.sequences import PolicyVersion

log = logging.getLogger(__name__)

LOSS_WINDOW_S = 3.0
"""Redis writes every second, and at the latest two seconds after a slow disk held it up."""


class QueueClient(ReplayClient):
    """A client whose acknowledgements and announcements are repeated; neither changes anything."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._announcement: tuple[PolicyVersion, int] | None = None
        self._announcing = asyncio.Lock()
        self._repeats: set[asyncio.Task[None]] = set()

    async def acknowledge(self, run: str, lease_ids: Sequence[str]) -> tuple[str, ...]:
        """Mark groups as consumed for good, and again later; return the leases that were lost."""
        lost = await super().acknowledge(run, lease_ids)
        if lease_ids:
            self._repeat(partial(super().acknowledge, run, tuple(lease_ids)))
        return lost

    async def advance_policy(
        self,
        run: str,
        policy_version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str] = (),
        max_outstanding_groups: int,
    ) -> int:
        """Announce the live policy, and again later; return the credits left."""
        async with self._announcing:
            credits_left = await super().advance_policy(
                run,
                policy_version,
                trained_lease_ids=trained_lease_ids,
                max_outstanding_groups=max_outstanding_groups,
            )
            self._announcement = (policy_version, max_outstanding_groups)
        self._repeat(partial(self._announce_again, run, tuple(trained_lease_ids)))
        return credits_left

    async def close(self) -> None:
        """Stop repeating."""
        for repeat in tuple(self._repeats):
            repeat.cancel()
        if self._repeats:
            await asyncio.wait(self._repeats)

    async def _announce_again(self, run: str, trained_lease_ids: tuple[str, ...]) -> None:
        """Announce the newest policy, which may be a later one by now."""
        async with self._announcing:  # so that it never comes after a newer one
            assert self._announcement is not None
            version, max_outstanding_groups = self._announcement
            await super().advance_policy(
                run,
                version,
                trained_lease_ids=trained_lease_ids,
                max_outstanding_groups=max_outstanding_groups,
            )

    def _repeat(self, call: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.create_task(_later(call))
        self._repeats.add(task)
        task.add_done_callback(self._repeats.discard)


async def _later(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.sleep(LOSS_WINDOW_S)
    try:
        await call()
    except DialoopError as error:
        # Of a purged run, or a queue that stays away: whoever calls it next says so.
        log.warning("The queue was not told again: %s", error)


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
