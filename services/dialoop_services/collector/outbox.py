"""Bring finished members into the queue as soon as they are finished.

While one call is under way the next members gather, and then go together.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop.clients.errors import is_outage
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DeadlineExceeded, DialoopError

if TYPE_CHECKING:
    from dialoop.clients.replay import Appended, MemberItem, ReplayClient

_MAX_ITEMS = 16


def is_away(error: Exception) -> bool:
    """Return whether the queue did not answer, which is no fault of what was sent."""
    return isinstance(error, DialoopError) and (
        is_outage(error) or isinstance(error, DeadlineExceeded)
    )


class Outbox:
    """Members on their way to the queue of a run, which retries for as long as the policy says."""

    def __init__(self, run: str, replay: ReplayClient, retry_policy: RetryPolicy) -> None:
        self._run = run
        self._replay = replay
        self._retry_policy = retry_policy
        self._waiting: list[tuple[MemberItem, asyncio.Future[Appended]]] = []
        self._sending: asyncio.Task[None] | None = None

    def put(self, item: MemberItem) -> asyncio.Future[Appended]:
        """Send the member and return its outcome to be awaited; it is sent even if nobody waits."""
        outcome: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, outcome))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return outcome

    async def flush(self) -> None:
        """Wait until all members are sent, or have failed."""
        if self._sending is not None:
            await asyncio.shield(self._sending)  # whoever stops waiting stops no one's members

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting[:_MAX_ITEMS]
                del self._waiting[:_MAX_ITEMS]
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: list[tuple[MemberItem, asyncio.Future[Appended]]]) -> None:
        items = [item for item, _ in batch]
        try:
            outcomes = await retry(
                lambda: self._replay.append_members(self._run, items), self._retry_policy
            )
        except Exception as error:
            if len(batch) > 1 and not is_away(error):
                for waiting in batch:  # one of them is refused, or they are too large together
                    await self._send([waiting])
                return
            for _, outcome in batch:
                if not outcome.cancelled():
                    outcome.set_exception(error)
        else:
            for (_, outcome), appended in zip(batch, outcomes, strict=True):
                if not outcome.cancelled():
                    outcome.set_result(appended)
