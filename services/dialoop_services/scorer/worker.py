"""The queue worker: lease unscored groups, score each as a whole, append it, then acknowledge it.

It scores up to `max_groups` groups at the same time and leases more as soon as there is room.

In this order a scorer that is killed loses nothing: a group that was not acknowledged is delivered
again, and of two scored copies the queue keeps the first one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dialoop.clients.replay import GroupLease, ReplayClient, ReturnItem
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError, InvalidConfig, InvalidInput
from dialoop.failures import log_failure, log_repeated
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Group, Stage
from dialoop.waits import waiting_for
from dialoop_learning.rl.advantages import mean_absolute_advantage

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from dialoop_services.scorer.servicer import Scorer
    from dialoop_services.scorer.settings import ScorerSettings

log = logging.getLogger(__name__)

_ALARM_EVERY = 16
"""Number of groups in a row that cannot be scored after which an error is logged."""

_MOST_FAILURES: Mapping[str, int] = {Reason.ESTIMATOR_FAILED: 2, Reason.REWARD_FAILED: 10}
"""Failures in a row, all alike, after which a user's function is not called again.

An estimator computes on numbers alone. A reward may ask a service, which comes back.
"""


class ScorerWorker:
    """Scores a run's groups until told to stop."""

    def __init__(self, settings: ScorerSettings, replay: ReplayClient, scorer: Scorer) -> None:
        self._settings = settings
        self._replay = replay
        self._scorer = scorer
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
        self._num_set_aside = 0  # in a row
        self._num_alike, self._failure = 0, ""  # failures of a user's function in a row
        self._leased: set[str] = set()  # leases of the groups that are being scored
        self._has_room = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Score until `stopping` is set; then finish the groups that are being scored."""
        async with asyncio.TaskGroup() as outer:
            keeping = outer.create_task(self._keep())
            async with asyncio.TaskGroup() as tasks:
                await self._lease_and_start(tasks, stopping)
            keeping.cancel()

    async def _lease_and_start(self, tasks: asyncio.TaskGroup, stopping: asyncio.Event) -> None:
        attempt = 0
        while not stopping.is_set():
            try:
                leases = await self._lease(stopping)
                attempt = 0 if leases else 1
            except DialoopError as error:
                log.warning("Not scoring: %s", error, extra={"reason": error.reason})
                attempt, leases = attempt + 1, ()
            for lease in leases:
                self._start(lease, tasks)
            if attempt:
                with suppress(TimeoutError):
                    wait_s = self._retry_policy.wait_s(attempt)
                    await asyncio.wait_for(stopping.wait(), wait_s)
            while len(self._leased) >= self._settings.max_groups and not stopping.is_set():
                self._has_room.clear()
                await _first_of(self._has_room.wait(), stopping.wait())

    def _start(self, lease: GroupLease, tasks: asyncio.TaskGroup) -> None:
        def end(_: asyncio.Task[None]) -> None:
            self._leased.discard(lease.lease_id)
            self._has_room.set()

        self._leased.add(lease.lease_id)
        tasks.create_task(self._deliver(lease)).add_done_callback(end)

    async def _lease(self, stopping: asyncio.Event) -> Sequence[GroupLease]:
        """Lease unscored groups as soon as there are any; return none when `stopping` is set."""
        leasing = self._replay.lease_groups(
            self._settings.run,
            Stage.UNSCORED,
            worker=self._settings.worker,
            max_groups=self._settings.max_groups - len(self._leased),
            lease_s=self._settings.lease_s,
            wait_s=self._settings.wait_s,
        )
        with waiting_for("replay", "groups to score", is_idle=True):
            answer, _ = await _first_of(leasing, stopping.wait())
        return () if answer.cancelled() else answer.result().leases

    async def _deliver(self, lease: GroupLease) -> None:
        """Score one group; where the queue stays away, leave the group to a later delivery."""
        try:
            await self._score(lease)
        except InvalidConfig:  # no other delivery mends it
            raise
        except DialoopError as error:
            log.warning(
                "A scored group did not reach the queue: %s", error, extra={"reason": error.reason}
            )

    async def _score(self, lease: GroupLease) -> None:
        """Score one group, then end its lease: append, drop, set aside or return the group."""
        group_id = lease.group.group_id
        try:
            scored = await self._scorer.score(lease.group)
        except InvalidInput as error:
            text = f"A group is set aside: {error}"
            log_repeated(log, logging.WARNING, text, kind=error.reason, group_id=group_id)
            await self._set_aside(lease, error.reason.lower())
        except DialoopError as error:
            run, ids, reason = self._settings.run, [lease.lease_id], error.reason.lower()
            # Uniform rewards are normal where tasks are easy or hard, and the config drops them.
            level = logging.INFO if error.reason == Reason.UNIFORM_REWARD else logging.WARNING
            text = f"A group is dropped: {error}"
            log_repeated(log, level, text, kind=error.reason, group_id=group_id)
            await retry(lambda: self._replay.drop(run, ids, reason), self._retry_policy)
            self._require_mendable(error)
        except Exception as error:
            log_failure(error, "Scoring a group")
            # The queue delivers it again, or makes it a dead letter.
            failed = DropReason.SCORER_FAILED
            await self._give_back(ReturnItem(lease_id=lease.lease_id, reason=failed, failed=True))
        else:
            await self._append(lease, scored)

    def _require_mendable(self, error: DialoopError) -> None:
        """Raise InvalidConfig where a function of the user has failed so often in the same way."""
        most = _MOST_FAILURES.get(error.reason)
        if most is None:
            if error.reason in (Reason.UNIFORM_REWARD, Reason.NO_REWARD):  # its functions worked
                self._num_alike = 0
            return
        failure = error.message.partition(" (error_id ")[0]
        self._num_alike = self._num_alike + 1 if failure == self._failure else 1
        self._failure = failure
        if self._num_alike >= most:
            raise InvalidConfig(
                f"{error.message} It did so {self._num_alike} times in a row.",
                reason=error.reason,
                remedy=error.remedy,
            )

    async def _append(self, lease: GroupLease, scored: Group) -> None:
        """Append the scored group; it is a duplicate if an earlier delivery was appended."""
        priority = mean_absolute_advantage(scored)
        outcome = await retry(
            lambda: self._replay.append_group(
                self._settings.run, Stage.SCORED, scored, lease_id=lease.lease_id, priority=priority
            ),
            self._retry_policy,
        )
        if outcome.reason == Reason.LEASE_LOST:
            log.info("Another scorer has that group.", extra={"group_id": scored.group_id})
        elif outcome.reason:
            log.error("A scored group was rejected: %s", outcome.message)
            await self._set_aside(lease, outcome.reason.lower())
        else:
            self._num_set_aside = self._num_alike = 0
            run, ids = self._settings.run, [lease.lease_id]
            await retry(lambda: self._replay.acknowledge(run, ids), self._retry_policy)

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

    async def _give_back(self, item: ReturnItem) -> None:
        run = self._settings.run
        await retry(lambda: self._replay.give_back(run, [item]), self._retry_policy)

    async def _keep(self) -> None:
        """Extend the leases; appending a group shows whether its lease was lost."""
        lease_s = self._settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            if not self._leased:
                continue
            try:
                await self._replay.extend(self._settings.run, sorted(self._leased), lease_s=lease_s)
            except DialoopError as error:
                log.warning("Leases are not extended.", extra={"reason": error.reason})


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Wait until one of them ends, and cancel the others; return all, ended."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return tasks
