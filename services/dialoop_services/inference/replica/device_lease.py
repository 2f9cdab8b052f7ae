"""A replica's lease of its device: what runs on it, and whether more may begin.

Awake, a replica holds the device's lock together with other replicas. To sleep it begins nothing
new, waits for what is under way, and releases the lock. Requests that come meanwhile fail with
ASLEEP, and callers send them again. A replica with a device of its own has no lock and never
sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dialoop.errors import PreconditionFailed, Unavailable
from dialoop.reasons import Reason

from dialoop_services.runtime.device_lock import DeviceLock, is_owned

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_S = 30.0
"""Seconds until requests that are under way are cancelled, by default."""


class DeviceLease:
    """The lease of one replica, which holds the device's lock while it lasts."""

    def __init__(self, lock: DeviceLock | None = None, *, take_within_s: float = 5.0) -> None:
        self._lock = lock
        self._take_within_s = take_within_s
        self._under_way: set[asyncio.Future[object]] = set()
        self._evicted: set[asyncio.Future[object]] = set()
        self.is_over = lock is not None and not lock.is_held

    def require_lock(self) -> None:
        """Raise PreconditionFailed (SLEEP_DISABLED) if the replica does not share its device."""
        if self._lock is None:
            raise PreconditionFailed(
                "This replica does not share its device, so it does not sleep.",
                reason=Reason.SLEEP_DISABLED,
                remedy='Set placement = "shared", or DIALOOP_INFERENCE_DEVICE_LOCK.',
            )

    async def run(self, work: Awaitable[T]) -> T:
        """Run `work` on the device; Unavailable (ASLEEP) when the lease ends before it does."""
        if self._lock is None:
            return await work
        working: asyncio.Future[T] = asyncio.ensure_future(work)
        future: asyncio.Future[object] = working  # type: ignore[assignment]  # whatever it gives
        self._under_way.add(future)
        try:
            return await working
        except asyncio.CancelledError:
            if future in self._evicted:
                raise asleep() from None
            raise
        finally:
            self._under_way.discard(future)
            self._evicted.discard(future)

    def close(self) -> None:
        """Refuse new work from now on."""
        self.is_over = True

    async def drain(self, within_s: float) -> None:
        """Wait for the work in flight, and cancel what is late."""
        if not self._under_way:
            return
        _, late = await asyncio.wait(set(self._under_way), timeout=within_s)
        for working in late:
            self._evicted.add(working)
            working.cancel()
        if late:
            await asyncio.wait(late)

    def release(self) -> None:
        """Release the device's lock."""
        if self._lock is not None:
            self._lock.release()

    async def take(self) -> None:
        """Hold the device again; Unavailable (ASLEEP) while the trainer has it."""
        if self._lock is not None and not await self._lock.share(within_s=self._take_within_s):
            raise asleep()

    def begin(self) -> None:
        """Allow requests to begin: the device is held and ready."""
        self.is_over = False

    @property
    def is_left(self) -> bool:
        """Return whether the replica sleeps and nobody has the device."""
        if self._lock is None or not self.is_over or self._lock.is_held:
            return False
        return not is_owned(self._lock.path)


@asynccontextmanager
async def lease_device(path: Path | None) -> AsyncIterator[DeviceLease]:
    """Wait for the device before the engine is built, and release it at the end.

    Without a path the replica does not share its device.
    """
    if path is None:
        yield DeviceLease()
        return
    lock = DeviceLock(path)
    if not lock.try_share():
        log.info("Waiting for the device: the trainer has it.")
        await lock.share()
    try:
        yield DeviceLease(lock)
    finally:
        lock.release()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; run it to its end even if the caller is cancelled."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with suppress(asyncio.CancelledError):  # the caller was cancelled again
                await asyncio.wait([working])
        if not working.cancelled():
            working.exception()  # a caller who was cancelled takes none, and it says why itself


def asleep() -> Unavailable:
    """Return the error of a request that comes while the trainer has the device."""
    return Unavailable(
        "The replica sleeps: the trainer has the device.",
        reason=Reason.ASLEEP,
        remedy="Ask again after the next publish, or another replica.",
    )
