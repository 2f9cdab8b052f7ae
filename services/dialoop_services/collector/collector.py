"""The collector: lease tasks, play them, append what was played, and lose nothing on the way.

Every trajectory that is finished is counted by the ledger exactly once: appended with its group,
as a discarded member of an appended group, or with the lease that is given back. Only a lease that
was lost to somebody else takes its trajectories with it; those are counted here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dialoop.clients.replay import AppendItem, ReturnItem
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Purpose, Stage

from dialoop_services.collector.player import MemberFailed, Round

if TYPE_CHECKING:
    from dialoop.clients.environment import EnvironmentClient, EnvironmentInfo
    from dialoop.clients.replay import ReplayClient, TaskLease
    from dialoop.trajectory import Group

    from dialoop_services.collector.counters import Counters
    from dialoop_services.collector.player import Player
    from dialoop_services.collector.settings import CollectorSettings
    from dialoop_services.collector.task_supply import TaskSupply

log = logging.getLogger(__name__)

_FAREWELL_S = 5.0


class Collector:
    """Owns the rounds being played: `lease_id` to round, and the task that plays it."""

    def __init__(
        self,
        settings: CollectorSettings,
        *,
        replay: ReplayClient,
        environment: EnvironmentClient,
        player: Player,
        task_supply: TaskSupply,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._replay = replay
        self._environment = environment
        self._player = player
        self._task_supply = task_supply
        self._counters = counters
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
        self._rounds: dict[str, Round] = {}
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._slot_freed = asyncio.Event()
        self._infos: dict[str, EnvironmentInfo] = {}

    async def run(self) -> None:
        """Collect until cancelled; then give back what is not finished."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._task_supply.run())
                tasks.create_task(self._keep_leases())
                while True:
                    for lease in await self._lease():
                        self._start(lease, tasks)
        finally:
            await self._say_farewell()

    async def _lease(self) -> tuple[TaskLease, ...]:
        """Tasks for the free slots; waits for a slot, for tasks, and while replay is away."""
        attempt = 0
        while True:
            while (free := self._settings.max_groups_in_flight - len(self._rounds)) <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            try:
                found = await self._replay.lease_tasks(
                    self._settings.run,
                    worker=self._settings.worker,
                    max_tasks=free,
                    lease_s=self._settings.lease_s,
                    wait_s=self._settings.wait_s,
                )
            except DialoopError as error:
                log.warning("No tasks leased.", extra={"reason": error.reason})
                found = None
            self._task_supply.look()
            if found is not None and found.leases:
                return found.leases
            # Replay has waited for us already, unless it is away or about to stop.
            attempt = attempt + 1 if found is None else 1
            await asyncio.sleep(self._retry_policy.wait_s(attempt))

    def _start(self, lease: TaskLease, tasks: asyncio.TaskGroup) -> None:
        round_ = Round(lease=lease)
        self._rounds[round_.lease_id] = round_
        playing = tasks.create_task(self._collect(round_))
        self._playing[round_.lease_id] = playing
        playing.add_done_callback(lambda _: self._finished(round_.lease_id))

    def _finished(self, lease_id: str) -> None:
        del self._playing[lease_id]
        self._slot_freed.set()

    async def _collect(self, round_: Round) -> None:
        """Play one round to its end in the ledger: appended or given back."""
        try:
            info = await self._info_of(round_.task.environment)
            sampling = self._settings.sampling_of(round_.task, info.stop)
            group = await self._player.play(round_, sampling, has_one_turn=info.max_turns == 1)
            await self._append(round_, group)
        except MemberFailed as failed:
            log.warning("A member failed: %s", failed, extra={"group_id": round_.group_id})
            reason = DropReason.SERVICE_AWAY if failed.is_outage else DropReason.MEMBER_FAILED
            await self._give_back(round_, reason, failed=not failed.is_outage)
        except DialoopError as error:
            log.warning("A group failed: %s", error, extra={"group_id": round_.group_id})
            await self._give_back(round_, error.reason.lower(), failed=not error.retryable)
        except Exception:
            log.exception("A group failed.", extra={"group_id": round_.group_id})
            await self._give_back(round_, DropReason.COLLECTOR_FAILED, failed=True)

    async def _info_of(self, environment: str) -> EnvironmentInfo:
        """The environment's stop strings and limits, asked for once."""
        if environment not in self._infos:
            self._infos[environment] = await retry(
                lambda: self._environment.get_environment(environment), self._retry_policy
            )
        return self._infos[environment]

    async def _append(self, round_: Round, group: Group) -> None:
        purpose = round_.task.purpose
        stage = Stage.UNSCORED if purpose is Purpose.TRAINING else Stage.EVALUATION
        num_discarded = len(round_.finished) - group.num_trajectories
        round_.is_settling = True
        item = AppendItem(group=group, lease_id=round_.lease_id, num_discarded=num_discarded)
        (outcome,) = await retry(
            lambda: self._replay.append_groups(self._settings.run, stage, [item]),
            self._retry_policy,
        )
        if outcome.reason == Reason.LEASE_LOST:
            self._lose(round_)
        elif outcome.is_rejected:
            log.error("A group was rejected: %s", outcome.message, extra={"reason": outcome.reason})
            await self._give_back(round_, outcome.reason.lower(), failed=True)
        else:
            del self._rounds[round_.lease_id]
            self._counters.appended(
                purpose, num_trajectories=group.num_trajectories, num_discarded=num_discarded
            )

    async def _give_back(self, round_: Round, reason: str, *, failed: bool) -> None:
        """Return the lease; a ledger that cannot be told takes it back when it runs out."""
        round_.is_settling = True
        self._counters.returned(reason)
        item = _returned(round_, reason, failed=failed)
        try:
            await retry(
                lambda: self._replay.give_back(self._settings.run, [item]), self._retry_policy
            )
        except DialoopError as error:
            log.warning("A task could not be given back.", extra={"reason": error.reason})
        self._rounds.pop(round_.lease_id, None)

    def _lose(self, round_: Round) -> None:
        log.warning("A lease was lost.", extra={"group_id": round_.group_id})
        del self._rounds[round_.lease_id]
        self._counters.lost(round_.task.purpose, num_trajectories=len(round_.finished))

    async def _keep_leases(self) -> None:
        """Extend the leases of what is played; stop playing what was lost."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            held = list(self._rounds)
            if not held:
                continue
            try:
                lost = await self._replay.extend(
                    self._settings.run, held, lease_s=self._settings.lease_s
                )
            except DialoopError as error:
                log.warning("Leases are not extended.", extra={"reason": error.reason})
                continue
            for lease_id in lost:
                self._abandon(lease_id)

    def _abandon(self, lease_id: str) -> None:
        """Stop a round that belongs to another by now."""
        round_, playing = self._rounds.get(lease_id), self._playing.get(lease_id)
        # The lease of a group that was just appended is gone too: its answer will say which.
        if round_ is not None and playing is not None and not round_.is_settling:
            self._lose(round_)
            playing.cancel()

    async def _say_farewell(self) -> None:
        """Give back what is still held, so that nobody has to wait for the leases to run out."""
        items = [_returned(r, DropReason.SHUTDOWN, failed=False) for r in self._rounds.values()]
        for item in items:
            self._counters.returned(item.reason)
        if not items:
            return
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._replay.give_back(self._settings.run, items)
        except (DialoopError, TimeoutError):
            log.warning("Leases are left to run out.", extra={"num_leases": len(items)})
        self._rounds.clear()


def _returned(round_: Round, reason: str, *, failed: bool) -> ReturnItem:
    return ReturnItem(
        lease_id=round_.lease_id,
        reason=reason,
        num_trajectories=len(round_.finished),
        failed=failed,
    )
