"""What the trainer says about itself: phase, counts, the published policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop.clients.trainer import Phase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.trainer.publisher import Published


class StatusBoard:
    """Written by the job, read by the servicer; both live in one event loop."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.num_train_steps = 0
        self.num_warm_start_steps = 0
        self.failure = ""
        self.newest: Published | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._announcements: set[asyncio.Queue[Published]] = set()

    @property
    def is_paused(self) -> bool:
        """Whether the next step waits for a resume."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """Let the running step end and start no other."""
        self._resumed.clear()

    def resume(self) -> None:
        """Go on."""
        self._resumed.set()

    async def wait_while_paused(self) -> None:
        """Return at once, or when resumed."""
        await self._resumed.wait()

    def published(self, published: Published) -> None:
        """Tell every watcher."""
        self.newest = published
        for queue in self._announcements:
            queue.put_nowait(published)

    async def publishes(self) -> AsyncIterator[Published]:
        """The newest publish at once, then every one that follows."""
        # Filled by `published` (a handful per minute), drained by the watcher's stream.
        queue: asyncio.Queue[Published] = asyncio.Queue()
        if self.newest is not None:
            queue.put_nowait(self.newest)
        self._announcements.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._announcements.discard(queue)
