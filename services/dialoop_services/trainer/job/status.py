"""What the trainer says about itself: phase, counts, the published policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop.clients.trainer import Phase
from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_services.trainer.publish.publisher import Published


class StatusBoard:
    """Written by the job, read by the servicer; both live in one event loop."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.num_train_steps = 0
        self.num_warm_start_steps = 0
        self.failure = ""
        self.newest: Published | None = None
        self.alarms: set[str] = set()
        self._stopping = asyncio.Event()
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
        """Return at once, or when resumed or stopped."""
        await self._resumed.wait()

    @property
    def is_stopping(self) -> bool:
        """Whether the job was told to take no other step."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let the running step end and the job with it, paused or not."""
        self._stopping.set()
        self._resumed.set()

    async def wait_until_stopping(self) -> None:
        """Return once the job was told to stop."""
        await self._stopping.wait()

    def sound(self, alarm: str, *, on: bool) -> None:
        """Sound an alarm, or end it."""
        if on:
            self.alarms.add(alarm)
        else:
            self.alarms.discard(alarm)

    def published(self, published: Published) -> None:
        """Tell every watcher."""
        self.newest = published
        for queue in self._announcements:
            queue.put_nowait(published)

    def fail(self, error: BaseException | None) -> None:
        """The job has failed: say why, but of what is not ours no more than its kind."""
        self.phase = Phase.FAILED
        known = _known(error)
        self.failure = str(known) if known else f"{type(error).__name__}; see the trainer's log"

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


def _known(error: BaseException | None) -> DialoopError | None:
    """The error of ours in a group of any depth."""
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := _known(inner))), None)
    return error if isinstance(error, DialoopError) else None
