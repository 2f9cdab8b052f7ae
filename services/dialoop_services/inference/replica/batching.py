"""Requests that begin together: the first waits for others, but never past its deadline.

batches = RequestBatches(BatchLimits(min_batch_size=8, max_batch_size=32, timeout_s=0.5))
async with batches.place(num_samples):    # begins with 7 more samples, or alone after 0.5 s
    await engine.sample(prompt_ids, sampling, stop=stop)

An engine decodes all requests that are there at each step, so by default nothing waits. Waiting
pays where the first step is expensive and many callers come within a short time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dialoop.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Least and most samples that begin together, and the seconds that the first may wait.

    max_batch_size: samples that are with the engine at one time; `None` is as many as it takes.
    """

    min_batch_size: int = 1
    max_batch_size: int | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        largest = self.max_batch_size
        if not 1 <= self.min_batch_size <= (largest or self.min_batch_size) or largest == 0:
            raise InvalidConfig(
                f"min_batch_size is {self.min_batch_size} and max_batch_size is {largest}.",
                remedy="Give 1 <= min_batch_size <= max_batch_size.",
            )
        if not 0 < self.timeout_s < float("inf"):
            raise InvalidConfig(
                f"The batching timeout is {self.timeout_s} s.",
                remedy="Give a finite number of seconds above 0.",
            )


class _Waiter:
    """One request that waits for its batch."""

    def __init__(self, size: int, ends_at: float) -> None:
        self.size = size
        self.ends_at = ends_at
        self.is_in = False
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def let_in(self) -> None:
        self.is_in = True
        if not self.turn.done():  # cancelled, and about to leave
            self.turn.set_result(None)


class RequestBatches:
    """Lets requests begin in batches, first come first served."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self._limits = limits or BatchLimits()
        # Filled by `place`, drained by `_admit`; the callers of `place` wait.
        self._waiting: deque[_Waiter] = deque()
        self._num_inside = 0
        self._is_released = False
        self._alarm: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, num_samples: int) -> AsyncIterator[None]:
        """Wait for a batch of at least `min_batch_size` samples, or for the deadline.

        A request is never split: one of more than `max_batch_size` samples begins alone.
        """
        ends_at = asyncio.get_running_loop().time() + self._limits.timeout_s
        waiter = _Waiter(num_samples, ends_at)
        self._waiting.append(waiter)
        self._admit()
        try:
            await waiter.turn
            yield
        finally:
            if waiter.is_in:
                self._num_inside -= num_samples
            else:
                self._waiting.remove(waiter)
            self._admit()

    def release(self) -> None:
        """Let requests wait for room only, and no more for others: the service is about to stop."""
        self._is_released = True
        self._admit()

    def _admit(self) -> None:
        """Let a batch in if it is due and there is room; else look again at the deadline."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._is_due():
            # A request of a due batch that finds no room now does not wait for others again.
            now = asyncio.get_running_loop().time()
            for waiter in self._waiting:
                waiter.ends_at = min(waiter.ends_at, now)
            while self._waiting and self._has_room(self._waiting[0].size):
                waiter = self._waiting.popleft()
                self._num_inside += waiter.size
                waiter.let_in()
        if self._waiting and not self._is_due():
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(self._waiting[0].ends_at, self._admit)

    def _is_due(self) -> bool:
        """Return whether enough wait, the oldest has waited long enough, or all are released."""
        if not self._waiting or self._is_released:
            return bool(self._waiting)
        num_waiting = sum(waiter.size for waiter in self._waiting)
        late = asyncio.get_running_loop().time() >= self._waiting[0].ends_at
        return late or num_waiting >= self._limits.min_batch_size

    def _has_room(self, size: int) -> bool:
        most = self._limits.max_batch_size
        return most is None or not self._num_inside or self._num_inside + size <= most
