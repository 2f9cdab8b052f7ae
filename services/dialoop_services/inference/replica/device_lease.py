"""A replica's turn on its device: what is under way on it, and whether it may begin something.

Awake, a replica holds the device's lock together with other replicas. To sleep it begins nothing
new, waits for what is under way, and lets the lock go; whoever asks meanwhile is told ASLEEP and
asks again. A replica with a device of its own has no lock, and never sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.errors import PreconditionFailed, Unavailable
from dialoop.reasons import Reason

from dialoop_services.runtime.device_lock import DeviceLock, is_owned

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Coroutine
    from pathlib import Path

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_S = 30.0
"""What is under way has so long to end, where nobody says otherwise."""


class DeviceTurn:
    """Owned by the replica; the lock is held while the device is ours."""

    def __init__(self, lock: DeviceLock | None = None, *, take_within_s: float = 5.0) -> None:
        self._lock = lock
        self._take_within_s = take_within_s
        self._under_way: set[asyncio.Future[object]] = set()
        self._evicted: set[asyncio.Future[object]] = set()
        self.is_over = lock is not None and not lock.is_held

    def require_lock(self) -> None:
        """Refuse what only a replica that shares its device can do."""
        if self._lock is None:
            raise PreconditionFailed(
                "This replica has its device for itself: it does not sleep.",
                reason=Reason.SLEEP_DISABLED,
                remedy='Set placement = "shared", or DIALOOP_INFERENCE_DEVICE_LOCK.',
            )

    async def run(self, work: Awaitable[T]) -> T:
        """Do something on the device; Unavailable (ASLEEP) when the turn ends before it does."""
        if self._lock is None:
            return await work
        working: asyncio.Future[T] = asyncio.ensure_future(work)
        known: asyncio.Future[object] = working  # type: ignore[assignment]  # whatever it gives
        self._under_way.add(known)
        try:
            return await working
        except asyncio.CancelledError:
            if known in self._evicted:
                raise asleep() from None
            raise
        finally:
            self._under_way.discard(known)
            self._evicted.discard(known)

    def close(self) -> None:
        """Nothing begins from now on."""
        self.is_over = True

    async def drain(self, within_s: float) -> None:
        """Wait for what is under way, and send away what is late."""
        if not self._under_way:
            return
        _, late = await asyncio.wait(set(self._under_way), timeout=within_s)
        for working in late:
            self._evicted.add(working)
            working.cancel()
        if late:
            await asyncio.wait(late)

    def let_go(self) -> None:
        """The device is nobody's now."""
        if self._lock is not None:
            self._lock.release()

    async def take(self) -> None:
        """Hold the device again; Unavailable (ASLEEP) while the trainer has it."""
        if self._lock is not None and not await self._lock.share(within_s=self._take_within_s):
            raise asleep()

    def begin(self) -> None:
        """The device is ours and ready."""
        self.is_over = False

    @property
    def is_left(self) -> bool:
        """Whether the replica sleeps and nobody has the device."""
        if self._lock is None or not self.is_over or self._lock.is_held:
            return False
        return not is_owned(self._lock.path)


@asynccontextmanager
async def device_turn(path: Path | None) -> AsyncIterator[DeviceTurn]:
    """The turn of a replica that starts: nothing is built on the device before it is ours.

    Without a path the device is its own.
    """
    if path is None:
        yield DeviceTurn()
        return
    lock = DeviceLock(path)
    if not lock.try_share():
        log.info("Waiting for the device, which the trainer has.")
        await lock.share()
    try:
        yield DeviceTurn(lock)
    finally:
        lock.release()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Its result; once begun it ends before this does, whoever leaves and however often."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with suppress(asyncio.CancelledError):  # one is on its way already
                await asyncio.wait([working])


def asleep() -> Unavailable:
    """What a request gets while the trainer has the device."""
    return Unavailable(
        "The replica sleeps: the trainer has the device.",
        reason=Reason.ASLEEP,
        remedy="Ask again after the next publish, or another replica.",
    )
