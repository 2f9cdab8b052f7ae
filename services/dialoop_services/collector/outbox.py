"""What a collector writes into the queue: finished members, and the turns of episodes in play."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from dialoop.clients.errors import is_outage
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.clients.turns import TurnItem
from dialoop.episode import RecordedTurn, Redo, Sample, StepResult, TurnLog
from dialoop.errors import DeadlineExceeded, DialoopError, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.waits import waiting_for

if TYPE_CHECKING:
    from dialoop.clients.replay import Appended, ReplayClient

    from dialoop_services.collector.player import GroupPlay

Item = TypeVar("Item")

_MAX_ITEMS = 16


def is_away(error: Exception) -> bool:
    """Return whether the queue did not answer, which is no fault of what was sent."""
    return isinstance(error, DialoopError) and (
        is_outage(error) or isinstance(error, DeadlineExceeded)
    )


class Outbox(Generic[Item]):
    """Items on their way to the queue, several at a time, for as long as the policy retries."""

    def __init__(
        self,
        append: Callable[[list[Item]], Awaitable[tuple[Appended, ...]]],
        retry_policy: RetryPolicy,
    ) -> None:
        self._append = append
        self._retry_policy = retry_policy
        self._waiting: list[tuple[Item, asyncio.Future[Appended]]] = []
        self._sending: asyncio.Task[None] | None = None

    def put(self, item: Item) -> asyncio.Future[Appended]:
        """Send the item and return its outcome to be awaited; it is sent even if nobody waits."""
        outcome: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, outcome))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return outcome

    async def flush(self) -> None:
        """Wait until all items are sent, or have failed."""
        if self._sending is not None:
            await asyncio.shield(self._sending)  # whoever stops waiting stops no one's items

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting[:_MAX_ITEMS]
                del self._waiting[:_MAX_ITEMS]
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: list[tuple[Item, asyncio.Future[Appended]]]) -> None:
        items = [item for item, _ in batch]
        try:
            outcomes = await retry(lambda: self._append(items), self._retry_policy)
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


class KeptTurns:
    """Keeps turns of episodes in the queue; `lost` is told of a play that has lost its lease."""

    def __init__(
        self,
        run: str,
        replay: ReplayClient,
        retry_policy: RetryPolicy,
        *,
        lost: Callable[[GroupPlay], None],
    ) -> None:
        self._run = run
        self._replay = replay
        self._retry_policy = retry_policy
        self._lost = lost
        self._outbox = Outbox[TurnItem](lambda items: replay.append_turns(run, items), retry_policy)

    async def log_of(self, play: GroupPlay, redo: Redo, member: int, *, anew: bool) -> MemberLog:
        """Return a member's log, with the turns that another play of it left unless `anew`."""
        turns: tuple[RecordedTurn, ...] = ()
        if not anew and member in play.lease.recorded_members:
            turns = await retry(
                lambda: self._replay.get_turns(self._run, play.lease_id, member=member),
                self._retry_policy,
            )
        return MemberLog(self, play, member, turns, redo=redo)

    async def append(self, play: GroupPlay, item: TurnItem) -> str:
        """Keep a turn; return why the queue does not, or an empty text."""
        with waiting_for("replay", "AppendTurns"):
            outcome = await asyncio.shield(self._outbox.put(item))
        if outcome.reason == Reason.LEASE_LOST:
            self._lost(play)
        return outcome.reason


class MemberLog(TurnLog):
    """The turns of one member in play, each in the queue before the environment sees it."""

    is_durable = True

    def __init__(
        self,
        kept: KeptTurns,
        play: GroupPlay,
        member: int,
        turns: Iterable[RecordedTurn],
        *,
        redo: Redo,
    ) -> None:
        super().__init__(turns, redo=redo)
        self._kept = kept
        self._play = play
        self._member = member

    async def append(self, sample: Sample, answer: StepResult | None) -> None:
        """Keep a turn; PreconditionFailed (LEASE_LOST) where another collector has the task.

        Where the queue has lost turns, with its disk's last second, it gets all once more. An
        episode that is too long for it goes on, and is played from the start if it is cut off.
        """
        await super().append(sample, answer)
        if not self.is_durable:
            return
        reason = await self._send(len(self.turns) - 1)
        if reason == Reason.STEP_GAP:
            reasons = [await self._send(number) for number in range(len(self.turns))]
            reason = reasons[-1]
        if reason == Reason.TOO_LARGE:
            self.is_durable = False
        elif reason:
            raise PreconditionFailed(
                f"The queue does not keep turn {len(self.turns) - 1} of an episode: {reason}.",
                reason=Reason(reason),
                remedy="The task is played by another collector, or again.",
            )

    async def _send(self, number: int) -> str:
        before = self.turns[number - 1] if number else None
        item = TurnItem(
            lease_id=self._play.lease_id,
            member=self._member,
            turn=self.turns[number],
            before=before,
        )
        return await self._kept.append(self._play, item)
