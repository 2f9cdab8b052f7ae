"""The interpreters of one event loop: limits on their number, and some that are kept ready.

`running`: each call takes one and gives it back when it ends; callers wait when none is left.
`places`: each persistent interpreter takes one and gives it back when it closes; callers wait.
`spares`: filled in the background and taken by calls that need an interpreter. Nobody waits for a
spare: if there is none, the call starts an interpreter.
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
    """Limits of a pool: PoolSize(max_running=32, max_interpreters=256, num_spares=2, ...)."""

    max_running: int
    max_interpreters: int
    num_spares: int
    max_wait_s: float


class Pool:
    """Starts interpreters and counts them. Make it on the event loop that uses it."""

    def __init__(self, rules: dict[str, Any], program: list[str] | None, size: PoolSize) -> None:
        self._rules, self._program, self._size = rules, program, size
        self._server = ForkServer()
        self._running = asyncio.Semaphore(size.max_running)
        self.places = asyncio.Semaphore(size.max_interpreters)
        self._spares: deque[Worker] = deque()
        self._refilling: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that the pool was made on."""
        return self._server.loop

    @property
    def forkserver_pid(self) -> int:
        """Return the process id of the fork server."""
        return self._server.pid

    @property
    def is_alive(self) -> bool:
        """Return whether it can start interpreters."""
        return self._server.is_alive

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Wait for a turn to run code; CapacityExhausted (SANDBOX_BUSY) if none comes in time."""
        await self._wait_for(self._running, Reason.SANDBOX_BUSY, "calls at one time")
        try:
            yield
        finally:
            self._running.release()

    async def take_place(self) -> None:
        """Take a place for a persistent interpreter; CapacityExhausted (SANDBOX_FULL)."""
        await self._wait_for(self.places, Reason.SANDBOX_FULL, "persistent interpreters")

    async def worker(self) -> Worker:
        """Return a fresh interpreter, a spare one if there is any."""
        worker = None
        while self._spares and worker is None:
            spare = self._spares.popleft()
            if spare.is_alive:
                worker = spare
            else:
                await spare.close()
        if self._size.num_spares and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._refill())
        return worker or await start_worker(self._server, self._rules, self._program)

    def close(self) -> None:
        """End the fork server, which ends every interpreter."""
        if self._refilling is not None and not self.loop.is_closed():
            self._refilling.cancel()
        self._spares.clear()
        self._server.close()

    async def _refill(self) -> None:
        while len(self._spares) < self._size.num_spares:
            try:
                worker = await start_worker(self._server, self._rules, self._program)
            except DialoopError:  # the next caller gets the error
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
