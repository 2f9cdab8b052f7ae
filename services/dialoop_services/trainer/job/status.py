"""The trainer's status: phase, counts, alarms, the published policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop.clients.trainer import Phase
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop.waits import waiting_for

from dialoop_services.runtime.exit_reason import known_error
from dialoop_services.trainer.job.state import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_services.trainer.publish.publisher import Published


REFUSED_UPDATES = "REFUSED_UPDATES"
"""The alarm that updates were refused, since the loss or its gradients were not finite; it ends
with the next batch whose updates are all applied."""

_MOST_REFUSED = 10
"""Refused updates in a row after which nothing suggests that the next will not be."""


class StatusBoard:
    """The job's state and status, which the job writes and the servicer reads in one event loop."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.state = JobState()
        self.failure = ""
        self.newest: Published | None = None
        self.alarms: set[str] = set()
        self._num_refused_in_a_row = 0
        self._stopping = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._announcements: set[asyncio.Queue[Published]] = set()

    @property
    def is_paused(self) -> bool:
        """Return whether the next step waits for a resume."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """Let the running step end, and start no other until resumed."""
        self._resumed.clear()

    def resume(self) -> None:
        """Let the job start steps again."""
        self._resumed.set()

    async def wait_while_paused(self) -> None:
        """Return at once, or when resumed or stopped."""
        with waiting_for("resume", "the next step"):
            await self._resumed.wait()

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let the running step end, then end the job, paused or not."""
        self._stopping.set()
        self._resumed.set()

    async def wait_until_stopping(self) -> None:
        """Return once `stop` was called."""
        await self._stopping.wait()

    def raise_alarm(self, alarm: str, *, on: bool) -> None:
        """Raise an alarm, or end it."""
        if on:
            self.alarms.add(alarm)
        else:
            self.alarms.discard(alarm)

    def count_updates(self, *, num_applied: int, num_refused: int, found: str) -> None:
        """Count the updates of a batch, and raise or end the alarm of those that were refused.

        found: what was not finite. Raises InvalidConfig (UPDATES_REFUSED) after many in a row.
        """
        self.state.num_refused_updates += num_refused
        self.raise_alarm(REFUSED_UPDATES, on=num_refused > 0)
        self._num_refused_in_a_row += num_refused
        if num_applied:
            self._num_refused_in_a_row = 0
        if self._num_refused_in_a_row >= _MOST_REFUSED:
            raise InvalidConfig(
                f"The last {self._num_refused_in_a_row} updates were refused: {found}.",
                reason=Reason.UPDATES_REFUSED,
                remedy="Correct the loss, or lower learning_rate in [train]. The newest policy was "
                "published before them.",
            )

    def announce(self, published: Published) -> None:
        """Send a publish to every watcher."""
        self.newest = published
        for queue in self._announcements:
            queue.put_nowait(published)

    def fail(self, error: BaseException) -> None:
        """Mark the job as failed; callers see the text of Dialoop's errors, of others the type."""
        self.phase = Phase.FAILED
        cause = known_error(error)
        is_ours = isinstance(cause, DialoopError)
        self.failure = str(cause) if is_ours else f"{type(error).__name__}; see the trainer's log"

    async def publishes(self) -> AsyncIterator[Published]:
        """Yield the newest publish at once, then every one that follows."""
        # `announce` fills it (a handful per minute), and the watcher's stream drains it.
        queue: asyncio.Queue[Published] = asyncio.Queue()
        if self.newest is not None:
            queue.put_nowait(self.newest)
        self._announcements.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._announcements.discard(queue)
