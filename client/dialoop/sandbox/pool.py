"""The interpreters of one event loop: how many there may be, and those kept ready.

`running`: filled by calls, drained as they end, the callers wait. `places`: filled by persistent
interpreters, drained as they close, the callers wait. `spares`: filled in the background, drained
by whoever needs an interpreter; nobody waits, an empty one means starting one now.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dialoop.errors import CapacityExhausted, DialoopError
from dialoop.reasons import Reason
from dialoop.sandbox.forkserver import ForkServer
from dialoop.sandbox.worker import Worker, start_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """PoolSize(max_running=32, max_interpreters=256, num_spares=2, max_wait_s=30)."""

    max_running: int
    max_interpreters: int
    num_spares: int
    max_wait_s: float


class Pool:
    """Starts interpreters and counts them; made on the loop that uses it."""

    def __init__(self, rules: dict[str, Any], program: list[str] | None, size: PoolSize) -> None:
        self._rules, self._program, self._size = rules, program, size
        self._server = ForkServer()
        self._running = asyncio.Semaphore(size.max_running)
        self.places = asyncio.Semaphore(size.max_interpreters)
        self._spares: deque[Worker] = deque()
        self._refilling: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it was made on."""
        return self._server.loop

    @property
    def forkserver_pid(self) -> int:
        """The process id of the fork server."""
        return self._server.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can start interpreters."""
        return self._server.is_alive

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A turn to run code; CapacityExhausted (SANDBOX_BUSY) when none comes in time."""
        await self._wait_for(self._running, Reason.SANDBOX_BUSY, "calls at one time")
        try:
            yield
        finally:
            self._running.release()

    async def take_place(self) -> None:
        """A place for a persistent interpreter; CapacityExhausted (SANDBOX_FULL)."""
        await self._wait_for(self.places, Reason.SANDBOX_FULL, "persistent interpreters")

    async def worker(self) -> Worker:
        """A fresh interpreter, one of those kept ready if there is one."""
        found = None
        while self._spares and found is None:
            spare = self._spares.popleft()
            if spare.is_alive:
                found = spare
            else:
                await spare.close()
        if self._size.num_spares and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._refill())
        return found or await start_worker(self._server, self._rules, self._program)

    def close(self) -> None:
        """End the fork server and with it every interpreter."""
        if self._refilling is not None and not self.loop.is_closed():
            self._refilling.cancel()
        self._spares.clear()
        self._server.close()

    async def _refill(self) -> None:
        while len(self._spares) < self._size.num_spares:
            try:
                worker = await start_worker(self._server, self._rules, self._program)
            except DialoopError:  # the next caller finds out for itself
                return
            self._spares.append(worker)

    async def _wait_for(self, semaphore: asyncio.Semaphore, reason: Reason, what: str) -> None:
        try:
            async with asyncio.timeout(self._size.max_wait_s):
                await semaphore.acquire()
        except TimeoutError:
            raise CapacityExhausted(
                f"The sandbox has no room: too many {what}.",
                reason=reason,
                remedy="Try again later, or raise max_running or max_interpreters.",
            ) from None
