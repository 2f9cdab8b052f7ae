"""The queue: a store, the checks in front of it, and waiting.

Waiting fills from local changes (the bell) and, for changes by other processes and for leases that
run out, from looking again every `poll_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Stage
from dialoop.v1 import trajectory_pb2

from dialoop_services.replay.change_signal import Bell, Ticket
from dialoop_services.replay.refusals import APPEND_MESSAGES
from dialoop_services.replay.store import (
    Acknowledgement,
    AppendStatus,
    CursorMove,
    EmptyReason,
    GivenBack,
    GroupLeases,
    GroupQuery,
    NewGroup,
    Offered,
    OfferedTask,
    Returned,
    Stats,
    Store,
    TaskLeases,
)
from dialoop_services.replay.validation import Rejection, check_group, group_digest, version_spans

_L = TypeVar("_L", TaskLeases, GroupLeases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A group as somebody sent it."""

    group: trajectory_pb2.Group
    lease_id: str
    num_discarded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a submission."""

    status: AppendStatus
    reason: str = ""
    message: str = ""


class ReplayQueue:
    """What the servicer calls; reads go straight to `store`."""

    def __init__(self, store: Store, *, vocab_size: int = 0, poll_s: float = 0.25) -> None:
        self.store = store
        self._vocab_size = vocab_size
        self._poll_s = poll_s
        self._bell = Bell()
        self._stop = asyncio.Event()

    def stop_waiting(self) -> None:
        """Answer all who wait, so that the service can end without cutting anybody off."""
        self._stop.set()
        self._bell.ring_all()

    async def offer_tasks(
        self, run: str, tasks: Sequence[OfferedTask], cursor: CursorMove | None
    ) -> Offered:
        """See `Store.offer_tasks`."""
        offered = await self.store.offer_tasks(run, tasks, cursor)
        self._bell.ring(run)
        return offered

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float, wait_s: float
    ) -> TaskLeases:
        """Up to `max_tasks`, as soon as there are any; else why not, after `wait_s`."""

        async def attempt() -> TaskLeases:
            return await self.store.lease_tasks(
                run, worker=worker, max_tasks=max_tasks, lease_s=lease_s
            )

        return await self._waited(run, attempt, wait_s)

    async def lease_groups(self, run: str, query: GroupQuery, *, wait_s: float) -> GroupLeases:
        """At least `min_groups`, as soon as there are as many; else why not, after `wait_s`."""

        async def attempt() -> GroupLeases:
            return await self.store.lease_groups(run, query)

        return await self._waited(run, attempt, wait_s)

    async def append_groups(
        self, run: str, stage: Stage, submissions: Sequence[Submission]
    ) -> tuple[Verdict, ...]:
        """Check each group and take in those that pass, once."""
        rejections = [
            check_group(submission.group, stage=stage, vocab_size=self._vocab_size)
            for submission in submissions
        ]
        pairs = zip(submissions, rejections, strict=True)
        groups = [_new_group(submission) for submission, rejection in pairs if rejection is None]
        appended = iter(await self.store.append_groups(run, stage, groups) if groups else ())
        if len(groups) < len(submissions):
            await self.store.count_rejected(run, len(submissions) - len(groups))
        self._bell.ring(run)
        return tuple(
            _refused(rejection)
            if rejection is not None
            else Verdict(
                status=(result := next(appended)).status,
                reason=result.reason,
                message=APPEND_MESSAGES.get(result.reason, ""),
            )
            for rejection in rejections
        )

    async def acknowledge(self, run: str, items: Sequence[Acknowledgement]) -> tuple[str, ...]:
        """See `Store.acknowledge`."""
        reasons = await self.store.acknowledge(run, items)
        self._bell.ring(run)
        return reasons

    async def give_back(self, run: str, items: Sequence[GivenBack]) -> Returned:
        """See `Store.give_back`."""
        returned = await self.store.give_back(run, items)
        self._bell.ring(run)
        return returned

    async def advance_policy(
        self,
        run: str,
        version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str],
        max_outstanding_groups: int,
    ) -> int:
        """See `Store.advance_policy`."""
        credits = await self.store.advance_policy(
            run,
            version,
            trained_lease_ids=trained_lease_ids,
            max_outstanding_groups=max_outstanding_groups,
        )
        self._bell.ring(run)
        return credits

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """See `Store.requeue`."""
        num_requeued = await self.store.requeue(run, group_ids)
        self._bell.ring(run)
        return num_requeued

    async def purge(self, run: str, confirm: str) -> None:
        """Forget the run if `confirm` repeats its name."""
        if confirm != run:
            raise PreconditionFailed(
                f"Run '{run}' is not deleted without confirmation.",
                reason="CONFIRM_RUN",
                remedy="Repeat the run's name in `confirm`.",
            )
        await self.store.purge(run)
        self._bell.ring(run)

    async def watch(self, run: str, interval_s: float) -> AsyncIterator[Stats]:
        """The stats at once, then after each change, at most every `interval_s`."""
        if interval_s <= 0:
            raise InvalidInput("interval_s is not positive.", remedy="Give seconds above 0.")
        last: Stats | None = None
        while not self._stop.is_set():
            ticket = self._bell.ticket(run)
            stats = await self.store.stats(run)
            if stats != last:
                last = stats
                yield stats
                await Ticket(self._stop).wait(interval_s)
            else:
                await ticket.wait(max(interval_s, self._poll_s))

    async def _waited(self, run: str, attempt: Callable[[], Awaitable[_L]], wait_s: float) -> _L:
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            ticket = self._bell.ticket(run)
            found = await attempt()
            remaining = end - clock()
            if found.empty_reason is EmptyReason.NOT_EMPTY:
                # What was leased changes the stats that others watch.
                self._bell.ring(run)
                return found
            if remaining <= 0 or self._stop.is_set():
                return found
            await ticket.wait(min(remaining, self._poll_s))


def _new_group(submission: Submission) -> NewGroup:
    group = submission.group
    return NewGroup(
        group_id=group.group_id,
        task_id=group.task.task_id,
        lease_id=submission.lease_id,
        num_trajectories=len(group.trajectories),
        digest=group_digest(group),
        versions=version_spans(group),
        payload=group.SerializeToString(),
        num_discarded=submission.num_discarded,
    )


def _refused(rejection: Rejection) -> Verdict:
    return Verdict(status=AppendStatus.REJECTED, reason=rejection.reason, message=rejection.message)
