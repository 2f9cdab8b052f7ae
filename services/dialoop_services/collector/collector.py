"""The collector: lease tasks, play their members, append each, and give back what failed.

The ledger counts every finished trajectory exactly once: appended, as an earlier play of an
appended member, or with the lease that is given back. The exception are trajectories under a lease
that another collector got; those are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dialoop.clients.errors import is_outage
from dialoop.clients.replay import MemberItem, ReturnItem
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Purpose
from dialoop.waits import waiting_for

from dialoop_services.collector.outbox import Outbox, is_away
from dialoop_services.collector.player import FailedMember, Round
from dialoop_services.config.tables import turns_spent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.clients.environment import EnvironmentClient, EnvironmentInfo
    from dialoop.clients.replay import Appended, LeasedTasks, ReplayClient, TaskLease
    from dialoop.waits import OpenWait

    from dialoop_services.collector.counters import Counters
    from dialoop_services.collector.player import GroupPlayer, PlayedMember
    from dialoop_services.collector.settings import CollectorSettings
    from dialoop_services.collector.task_supply import TaskSupply


Beside: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""What runs beside a collector until it ends."""

log = logging.getLogger(__name__)

_SHUTDOWN_S = 5.0
_LAST_LEASE_S = 1.0


class Collector:
    """Owns the rounds that are being played and the tasks that play them, both by lease id."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        settings: CollectorSettings,
        *,
        replay: ReplayClient,
        environment: EnvironmentClient,
        player: GroupPlayer,
        task_supply: TaskSupply,
        counters: Counters,
        beside: tuple[Beside, ...] = (),
    ) -> None:
        self._settings = settings
        self._replay = replay
        self._environment = environment
        self._player = player
        self._task_supply = task_supply
        self._counters = counters
        self._beside = beside
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
        self._outbox = Outbox(settings.run, replay, self._retry_policy)
        self._rounds: dict[str, Round] = {}
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._slot_freed = asyncio.Event()
        self._infos: dict[str, EnvironmentInfo] = {}

    async def run(self) -> None:
        """Collect until cancelled; then give unfinished tasks back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._task_supply.run())
                tasks.create_task(self._keep_leases())
                for run in self._beside:
                    tasks.create_task(run())
                while True:
                    with waiting_for("replay", "tasks to play", is_idle=True) as wait:
                        leases = await self._lease(wait)
                    for lease in leases:
                        self._start(lease, tasks)
        finally:
            await self._give_back_all()

    @property
    def num_playing(self) -> int:
        """Return the number of episodes that are still to be finished here."""
        return sum(round_.num_left for round_ in self._rounds.values())

    async def _lease(self, wait: OpenWait) -> tuple[TaskLease, ...]:
        """Lease tasks for the free slots. Wait for a slot, for tasks, and while replay is away."""
        attempt = 0
        while True:
            while (free := self._settings.max_groups_in_flight - len(self._rounds)) <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                wait.restart()
            try:
                answer = await self._ask_for_tasks(free)
            except DialoopError as error:
                log.warning("No tasks leased.", extra={"reason": error.reason})
                answer = None
            self._task_supply.check_soon()
            if answer is not None and answer.leases:
                return answer.leases
            # Replay has already waited for tasks, unless it is away or about to stop.
            attempt = attempt + 1 if answer is None else 1
            await asyncio.sleep(self._retry_policy.wait_s(attempt))

    async def _ask_for_tasks(self, max_tasks: int) -> LeasedTasks:
        """Lease tasks; when cancelled, first keep those whose answer is on its way.

        The ledger has leased them to this collector, and only it can give them back.
        """
        asking = asyncio.ensure_future(
            self._replay.lease_tasks(
                self._settings.run,
                worker=self._settings.worker,
                max_tasks=max_tasks,
                lease_s=self._settings.lease_s,
                wait_s=self._settings.wait_s,
            )
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(DialoopError, TimeoutError):
                answer = await asyncio.wait_for(asking, _LAST_LEASE_S)
                for lease in answer.leases:
                    self._rounds[lease.lease_id] = Round(lease=lease)
            raise

    def _start(self, lease: TaskLease, tasks: asyncio.TaskGroup) -> None:
        round_ = Round(lease=lease)
        self._rounds[round_.lease_id] = round_
        playing = tasks.create_task(self._collect(round_))
        self._playing[round_.lease_id] = playing
        playing.add_done_callback(lambda _: self._free_slot(round_.lease_id))

    def _free_slot(self, lease_id: str) -> None:
        del self._playing[lease_id]
        self._slot_freed.set()

    async def _collect(self, round_: Round) -> None:
        """Play one round; its members are appended meanwhile. Give its lease back if any failed."""
        round_.has_begun = self._may_begin(round_.task.purpose)
        if not round_.has_begun:
            # Failed, so that the ledger gives the task up instead of issuing it again.
            await self._give_back(round_, turns_spent(self._settings.total_turns), failed=True)
            return
        try:
            info = await self._info_of(round_.task.environment)
            sampling = self._settings.sampling_of(round_.task, info.stop)
            failed = await self._player.play(round_, sampling, partial(self._append, round_))
        except DialoopError as error:
            log.warning("A group failed: %s", error, extra={"group_id": round_.group_id})
            await self._give_back(round_, error.reason.lower(), failed=not is_outage(error))
        except Exception:
            log.exception("A group failed.", extra={"group_id": round_.group_id})
            await self._give_back(round_, DropReason.COLLECTOR_FAILED, failed=True)
        else:
            await self._end(round_, failed)

    def _may_begin(self, purpose: Purpose) -> bool:
        """Return whether turns are left for another group of this purpose.

        Evaluations are not limited. An episode under way counts as one turn.
        """
        total_turns = self._settings.total_turns
        if total_turns < 0 or purpose is not Purpose.TRAINING:
            return True
        num_playing = sum(
            round_.num_left
            for round_ in self._rounds.values()
            if round_.has_begun and round_.task.purpose is purpose
        )
        return self._counters.num_training_turns + num_playing < total_turns

    async def _end(self, round_: Round, failed: Mapping[int, FailedMember]) -> None:
        """End a round whose members were all played: the ledger has those that did not fail."""
        for failure in failed.values():
            log.warning("A member failed: %s", failure.message, extra={"group_id": round_.group_id})
        at_fault = {member: f for member, f in failed.items() if not f.is_outage}
        if not failed:
            self._rounds.pop(round_.lease_id, None)
            self._counters.count_group(round_.task.purpose)
            return
        first = next(iter((at_fault or failed).values()))
        await self._give_back(
            round_, first.reason, failed=bool(at_fault), failed_members=tuple(sorted(at_fault))
        )

    async def _info_of(self, environment: str) -> EnvironmentInfo:
        """Return the environment's stop strings and limits, which are requested once."""
        if environment not in self._infos:
            self._infos[environment] = await retry(
                lambda: self._environment.get_environment(environment), self._retry_policy
            )
        return self._infos[environment]

    async def _append(self, round_: Round, played: PlayedMember) -> FailedMember | None:
        """Append a finished member; return why the ledger does not take it, or None."""
        if self._settings.total_turns >= 0:
            # What is in the queue has been counted, even if this process is killed right now.
            await self._counters.save_at_last()
        trajectory = played.trajectory
        if self._settings.last_turn_only and round_.task.purpose is Purpose.TRAINING:
            num_turns = len(trajectory.turns)
            trajectory = trajectory.part(max(0, num_turns - 1), num_turns)
        item = MemberItem(
            lease_id=round_.lease_id,
            member=played.member,
            trajectory=trajectory,
            num_discarded=played.num_discarded,
        )
        try:
            outcome = await self._send(round_, item)
        except DialoopError as error:
            return FailedMember(
                reason=error.reason.lower(), message=str(error), is_outage=is_away(error)
            )
        if outcome.reason in (Reason.LEASE_LOST, Reason.DIGEST_MISMATCH):
            self._abandon(round_)
        elif outcome.is_rejected and outcome.reason != Reason.NO_ROOM:
            return FailedMember(reason=outcome.reason.lower(), message=outcome.message)
        return None

    async def _send(self, round_: Round, item: MemberItem) -> Appended:
        """Return what the ledger says; wait for a version that it does not know, or has lost.

        A ledger that came back without its last second is told its newest policy again.
        """
        announced_by = asyncio.get_running_loop().time() + self._settings.patience_s
        attempt = 0
        while True:
            sent = self._outbox.put(item)
            sent.add_done_callback(partial(self._count_appended, round_, item.num_discarded))
            outcome = await asyncio.shield(sent)
            is_unknown = outcome.reason == Reason.FUTURE_VERSION
            if not is_unknown or asyncio.get_running_loop().time() >= announced_by:
                return outcome
            attempt += 1
            with waiting_for("replay", "the announcement of a policy"):
                await asyncio.sleep(self._retry_policy.wait_s(attempt))

    def _count_appended(
        self, round_: Round, num_discarded: int, sent: asyncio.Future[Appended]
    ) -> None:
        if sent.cancelled() or sent.exception() is not None:
            return
        outcome = sent.result()
        # A full queue counts the member, and drops it with its group.
        if outcome.is_rejected and outcome.reason != Reason.NO_ROOM:
            return
        round_.num_counted += 1 + num_discarded
        self._counters.count_append(round_.task.purpose, num_discarded=num_discarded)

    async def _give_back(
        self, round_: Round, reason: str, *, failed: bool, failed_members: tuple[int, ...] = ()
    ) -> None:
        """Give the lease back. If replay is away, the ledger takes it back when it expires."""
        round_.is_ending = True
        await self._outbox.flush()
        self._counters.count_return(reason)
        item = _return_item(round_, reason, failed=failed, failed_members=failed_members)
        try:
            await retry(
                lambda: self._replay.give_back(self._settings.run, [item]), self._retry_policy
            )
        except DialoopError as error:
            log.warning("A task could not be given back.", extra={"reason": error.reason})
        self._rounds.pop(round_.lease_id, None)

    def _abandon(self, round_: Round) -> None:
        """Stop a round whose task another collector may have by now."""
        if self._rounds.pop(round_.lease_id, None) is None:
            return
        log.warning("A lease was lost.", extra={"group_id": round_.group_id})
        num_lost = round_.num_played - round_.num_counted
        self._counters.count_lost_lease(round_.task.purpose, num_trajectories=num_lost)
        self._playing[round_.lease_id].cancel()

    async def _keep_leases(self) -> None:
        """Extend the leases of all rounds; stop rounds whose lease was lost."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            lease_ids = list(self._rounds)
            if not lease_ids:
                continue
            try:
                lost = await self._replay.extend(
                    self._settings.run, lease_ids, lease_s=self._settings.lease_s
                )
            except DialoopError as error:
                log.warning("Leases are not extended.", extra={"reason": error.reason})
                continue
            for lease_id in lost:
                round_ = self._rounds.get(lease_id)
                # The lease of a round that is ending is also gone if its last append succeeded, and
                # the answer to that append will show it.
                if round_ is not None and not round_.is_ending:
                    self._abandon(round_)

    async def _give_back_all(self) -> None:
        """Give all leases back, so that other collectors need not wait until they expire."""
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._outbox.flush()
                rounds = self._rounds.values()
                items = [_return_item(r, DropReason.SHUTDOWN, failed=False) for r in rounds]
                for item in items:
                    self._counters.count_return(item.reason)
                if items:
                    await self._replay.give_back(self._settings.run, items)
        except (DialoopError, TimeoutError):
            log.warning("Leases are left to expire.", extra={"num_leases": len(self._rounds)})
        self._rounds.clear()


def _return_item(
    round_: Round, reason: str, *, failed: bool, failed_members: tuple[int, ...] = ()
) -> ReturnItem:
    return ReturnItem(
        lease_id=round_.lease_id,
        reason=reason,
        num_trajectories=round_.num_played - round_.num_counted,
        failed=failed,
        failed_members=failed_members,
    )
