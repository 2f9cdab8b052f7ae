"""The queue worker: lease unscored groups, score each as a whole, append it, then acknowledge it.

In this order a scorer that is killed loses nothing: a group that was not acknowledged is delivered
again, and of two scored copies the queue keeps the first one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from dialoop.clients.replay import ReturnItem
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError, InvalidInput
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dialoop.clients.replay import GroupLease, ReplayClient
    from dialoop.trajectory import Group

    from dialoop_services.scorer.servicer import SerialScorer
    from dialoop_services.scorer.settings import ScorerSettings

log = logging.getLogger(__name__)

_ALARM_EVERY = 16
"""Number of groups in a row that cannot be scored after which an error is logged."""


class ScorerWorker:
    """Scores a run's groups until told to stop."""

    def __init__(
        self, settings: ScorerSettings, replay: ReplayClient, scorer: SerialScorer
    ) -> None:
        self._settings = settings
        self._replay = replay
        self._scorer = scorer
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
        self._num_set_aside = 0  # in a row

    async def run(self, stopping: asyncio.Event) -> None:
        """Score until `stopping` is set; then finish the present group and return the others."""
        attempt = 0
        while not stopping.is_set():
            try:
                leases = await self._lease(stopping)
                await self._score_all(leases, stopping)
                attempt = 0 if leases else 1
            except DialoopError as error:
                log.warning("Not scoring: %s", error, extra={"reason": error.reason})
                attempt += 1
            if attempt:
                await _sleep(self._retry_policy.wait_s(attempt), stopping)

    async def _lease(self, stopping: asyncio.Event) -> Sequence[GroupLease]:
        """Lease unscored groups as soon as there are any; return none when `stopping` is set."""
        leasing = asyncio.ensure_future(
            self._replay.lease_groups(
                self._settings.run,
                Stage.UNSCORED,
                worker=self._settings.worker,
                max_groups=self._settings.max_groups,
                lease_s=self._settings.lease_s,
                wait_s=self._settings.wait_s,
            )
        )
        stop = asyncio.ensure_future(stopping.wait())
        async with _cancelled_at_exit(leasing), _cancelled_at_exit(stop):
            await asyncio.wait([stop, leasing], return_when=asyncio.FIRST_COMPLETED)
        return () if leasing.cancelled() else leasing.result().leases

    async def _score_all(self, leases: Sequence[GroupLease], stopping: asyncio.Event) -> None:
        waiting = list(leases)
        ids = [lease.lease_id for lease in leases]
        async with _cancelled_at_exit(asyncio.ensure_future(self._keep(ids))):
            while waiting and not stopping.is_set():
                await self._score(waiting.pop(0))
        if waiting:
            items = [
                ReturnItem(lease_id=lease.lease_id, reason=DropReason.SHUTDOWN) for lease in waiting
            ]
            await self._replay.give_back(self._settings.run, items)

    async def _score(self, lease: GroupLease) -> None:
        """Score one group, then end its lease: append, drop, set aside or return the group."""
        group_id = lease.group.group_id
        try:
            scored = await self._scorer.score(lease.group)
        except InvalidInput as error:
            log.warning("A group is set aside: %s", error, extra={"group_id": group_id})
            await self._set_aside(lease, error.reason.lower())
        except DialoopError as error:
            # Uniform rewards are normal where tasks are easy or hard, and the config drops them.
            level = logging.INFO if error.reason == Reason.UNIFORM_REWARD else logging.WARNING
            log.log(level, "A group is dropped: %s", error, extra={"group_id": group_id})
            await self._drop(lease, error.reason.lower())
        except Exception:
            log.exception("A group cannot be scored.", extra={"group_id": group_id})
            await self._return_failed(lease)
        else:
            await self._append(lease, scored)

    async def _append(self, lease: GroupLease, scored: Group) -> None:
        """Append the scored group; it is a duplicate if an earlier delivery was appended."""
        outcome = await retry(
            lambda: self._replay.append_group(
                self._settings.run, Stage.SCORED, scored, lease_id=lease.lease_id
            ),
            self._retry_policy,
        )
        if outcome.reason == Reason.LEASE_LOST:
            log.info("Another scorer has that group.", extra={"group_id": scored.group_id})
        elif outcome.reason:
            log.error("A scored group was rejected: %s", outcome.message)
            await self._set_aside(lease, outcome.reason.lower())
        else:
            self._num_set_aside = 0
            run, ids = self._settings.run, [lease.lease_id]
            await retry(lambda: self._replay.acknowledge(run, ids), self._retry_policy)

    async def _drop(self, lease: GroupLease, reason: str) -> None:
        run, ids = self._settings.run, [lease.lease_id]
        await retry(lambda: self._replay.drop(run, ids, reason), self._retry_policy)

    async def _set_aside(self, lease: GroupLease, reason: str) -> None:
        """Make the group a dead letter for people to look at, because no scorer can score it."""
        self._num_set_aside += 1
        if self._num_set_aside % _ALARM_EVERY == 0:
            log.error(
                "The last %d groups could not be scored and are dead letters now; the trainer "
                "waits for groups. The last reason: %s.",
                self._num_set_aside,
                reason,
            )
        await self._give_back(ReturnItem(lease_id=lease.lease_id, reason=reason, set_aside=True))

    async def _return_failed(self, lease: GroupLease) -> None:
        """Return the group as failed; the queue delivers it again, or makes it a dead letter."""
        item = ReturnItem(lease_id=lease.lease_id, reason=DropReason.SCORER_FAILED, failed=True)
        await self._give_back(item)

    async def _give_back(self, item: ReturnItem) -> None:
        run = self._settings.run
        await retry(lambda: self._replay.give_back(run, [item]), self._retry_policy)

    async def _keep(self, lease_ids: Sequence[str]) -> None:
        """Extend the leases; appending a group shows whether its lease was lost."""
        lease_s = self._settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                await self._replay.extend(self._settings.run, lease_ids, lease_s=lease_s)
            except DialoopError as error:
                log.warning("Leases are not extended.", extra={"reason": error.reason})


@asynccontextmanager
async def _cancelled_at_exit(task: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Cancel a task on leaving. A TaskGroup would wrap its errors in an ExceptionGroup."""
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _sleep(seconds: float, stopping: asyncio.Event) -> None:
    """Sleep, but no longer than until `stopping` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
