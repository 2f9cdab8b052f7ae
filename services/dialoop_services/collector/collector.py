"""The collector: lease tasks, play their members, append each, and give back what failed.

The ledger counts every finished trajectory exactly once: appended, as an earlier play of an
appended member, or with the lease that is given back. The exception are trajectories under a lease
that another collector got; those are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dialoop.clients.errors import is_outage
from dialoop.clients.replay import MemberItem, ReturnItem
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError
from dialoop.failures import log_failure, log_repeated
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Purpose
from dialoop.waits import OpenWait, waiting_for

from dialoop_services.collector.outbox import KeptTurns, Outbox, is_away
from dialoop_services.collector.player import FailedMember, GroupPlay, GroupPlayer, PlayedMember
from dialoop_services.collector.window import LOOK_S, Window
from dialoop_services.config.tables import turns_spent

if TYPE_CHECKING:
    from dialoop.clients.environment import EnvironmentClient, EnvironmentInfo
    from dialoop.clients.replay import Appended, LeasedTasks, MemberItem, ReplayClient, TaskLease

    from dialoop_services.collector.counters import Counters
    from dialoop_services.collector.settings import CollectorSettings
    from dialoop_services.collector.task_supply import TaskSupply


Beside: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""What runs beside a collector until it ends."""

log = logging.getLogger(__name__)

_SHUTDOWN_S = 5.0
_LAST_LEASE_S = 1.0


class Collector:
    """Owns the groups that are being played, and the tasks that play them, both by lease id."""

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
        window: Window | None = None,
    ) -> None:
        self._settings = settings
        self._window = window or Window(settings.max_groups_in_flight)
        self._replay = replay
        self._environment = environment
        self._player = player
        self._task_supply = task_supply
        self._counters = counters
        self._beside = beside
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
        self._outbox = Outbox[MemberItem](
            lambda items: replay.append_members(settings.run, items), self._retry_policy
        )
        self._turns = KeptTurns(settings.run, replay, self._retry_policy, lost=self._abandon)
        self._plays: dict[str, GroupPlay] = {}
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
        return sum(play.num_left for play in self._plays.values())

    async def _lease(self, wait: OpenWait) -> tuple[TaskLease, ...]:
        """Lease tasks for the free slots. Wait for a slot, for tasks, and while replay is away."""
        attempt = 0
        while True:
            while (free := self._window.room(len(self._plays))) <= 0:
                self._slot_freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
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
                    self._plays[lease.lease_id] = GroupPlay(lease=lease)
            raise

    def _start(self, lease: TaskLease, tasks: asyncio.TaskGroup) -> None:
        play = GroupPlay(lease=lease)
        self._plays[play.lease_id] = play
        playing = tasks.create_task(self._collect(play))
        self._playing[play.lease_id] = playing
        playing.add_done_callback(lambda _: self._free_slot(play.lease_id))

    def _free_slot(self, lease_id: str) -> None:
        del self._playing[lease_id]
        self._slot_freed.set()

    async def _collect(self, play: GroupPlay) -> None:
        """Play one group; its members are appended meanwhile. Give its lease back if any failed."""
        play.has_begun = self._may_begin(play.task.purpose)
        if not play.has_begun:
            # Failed, so that the ledger gives the task up instead of issuing it again.
            await self._give_back(play, turns_spent(self._settings.total_turns), failed=True)
            return
        try:
            info = await self._info_of(play.task.environment)
            sampling = self._settings.sampling_of(play.task, info.stop)
            log_of = partial(self._turns.log_of, play, info.spec.redo)
            failed = await self._player.play(
                play, sampling, partial(self._append, play), log_of=log_of
            )
        except DialoopError as error:
            self._warn(play, f"A group failed: {error}", error.reason)
            await self._give_back(play, error.reason.lower(), failed=not is_outage(error))
        except Exception as error:
            log_failure(error, "A group")
            await self._give_back(play, DropReason.COLLECTOR_FAILED, failed=True)
        else:
            await self._end(play, failed)

    def _may_begin(self, purpose: Purpose) -> bool:
        """Return whether turns are left for another group of this purpose.

        Evaluations are not limited. An episode under way counts as one turn.
        """
        total_turns = self._settings.total_turns
        if total_turns < 0 or purpose is not Purpose.TRAINING:
            return True
        num_playing = sum(
            play.num_left
            for play in self._plays.values()
            if play.has_begun and play.task.purpose is purpose
        )
        return self._counters.num_training_turns + num_playing < total_turns

    async def _end(self, play: GroupPlay, failed: Mapping[int, FailedMember]) -> None:
        """End a play whose members were all played: the ledger has those that did not fail."""
        for failure in failed.values():
            self._warn(play, f"A member failed: {failure.message}", failure.kind or failure.reason)
            self._counters.note_failure(failure.message)
        at_fault = {member: f for member, f in failed.items() if not f.is_outage}
        if not failed:
            self._plays.pop(play.lease_id, None)
            self._counters.count_group(play.task.purpose)
            return
        first = next(iter((at_fault or failed).values()))
        await self._give_back(
            play, first.reason, failed=bool(at_fault), failed_members=tuple(sorted(at_fault))
        )

    def _warn(self, play: GroupPlay, text: str, kind: str) -> None:
        kinds = (play.task.environment, kind)
        log_repeated(log, logging.WARNING, text, kind=kinds, group_id=play.group_id)

    async def _info_of(self, environment: str) -> EnvironmentInfo:
        """Return the environment's stop strings and limits, which are requested once."""
        if environment not in self._infos:
            self._infos[environment] = await retry(
                lambda: self._environment.get_environment(environment), self._retry_policy
            )
        return self._infos[environment]

    async def _append(self, play: GroupPlay, played: PlayedMember) -> FailedMember | None:
        """Append a finished member; return why the ledger does not take it, or None."""
        if self._settings.total_turns >= 0:
            # What is in the queue has been counted, even if this process is killed right now.
            await self._counters.save_at_last()
        trajectory = played.trajectory
        if self._settings.last_turn_only and play.task.purpose is Purpose.TRAINING:
            num_turns = len(trajectory.turns)
            trajectory = trajectory.part(max(0, num_turns - 1), num_turns)
        item = MemberItem(
            lease_id=play.lease_id,
            member=played.member,
            trajectory=trajectory,
            num_discarded=played.num_discarded,
        )
        try:
            outcome = await self._send(play, item)
        except DialoopError as error:
            return FailedMember(
                reason=error.reason.lower(), message=str(error), is_outage=is_away(error)
            )
        if outcome.reason in (Reason.LEASE_LOST, Reason.DIGEST_MISMATCH):
            self._abandon(play)
        elif outcome.is_rejected and outcome.reason != Reason.NO_ROOM:
            return FailedMember(reason=outcome.reason.lower(), message=outcome.message)
        return None

    async def _send(self, play: GroupPlay, item: MemberItem) -> Appended:
        """Return what the ledger says; wait for a version that it does not know, or has lost.

        A ledger that came back without its last second is told its newest policy again.
        """
        announced_by = asyncio.get_running_loop().time() + self._settings.patience_s
        attempt = 0
        while True:
            sent = self._outbox.put(item)
            sent.add_done_callback(partial(self._count_appended, play, item.num_discarded))
            outcome = await asyncio.shield(sent)
            is_unknown = outcome.reason == Reason.FUTURE_VERSION
            if not is_unknown or asyncio.get_running_loop().time() >= announced_by:
                return outcome
            attempt += 1
            with waiting_for("replay", "the announcement of a policy"):
                await asyncio.sleep(self._retry_policy.wait_s(attempt))

    def _count_appended(
        self, play: GroupPlay, num_discarded: int, sent: asyncio.Future[Appended]
    ) -> None:
        if sent.cancelled() or sent.exception() is not None:
            return
        outcome = sent.result()
        # A full queue counts the member, and drops it with its group.
        if outcome.is_rejected and outcome.reason != Reason.NO_ROOM:
            return
        play.num_counted += 1 + num_discarded
        self._counters.count_append(play.task.purpose, num_discarded=num_discarded)

    async def _give_back(
        self, play: GroupPlay, reason: str, *, failed: bool, failed_members: tuple[int, ...] = ()
    ) -> None:
        """Give the lease back. If replay is away, the ledger takes it back when it expires."""
        play.is_ending = True
        await self._outbox.flush()
        self._counters.count_return(reason)
        item = _return_item(play, reason, failed=failed, failed_members=failed_members)
        try:
            await retry(
                lambda: self._replay.give_back(self._settings.run, [item]), self._retry_policy
            )
        except DialoopError as error:
            log.warning("A task could not be given back.", extra={"reason": error.reason})
            self._count_lost(play)
        self._plays.pop(play.lease_id, None)

    def _abandon(self, play: GroupPlay) -> None:
        """Stop a play whose task another collector may have by now."""
        if self._plays.pop(play.lease_id, None) is None:
            return
        log.warning("A lease was lost.", extra={"group_id": play.group_id})
        self._count_lost(play)
        self._playing[play.lease_id].cancel()

    def _count_lost(self, play: GroupPlay) -> None:
        """Count finished trajectories of which the ledger may never hear."""
        num_lost = play.num_played - play.num_counted
        self._counters.count_lost_lease(play.task.purpose, num_trajectories=num_lost)

    async def _keep_leases(self) -> None:
        """Extend the leases of all plays; stop those whose lease was lost."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            lease_ids = list(self._plays)
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
                play = self._plays.get(lease_id)
                # The lease of a play that is ending is also gone if its last append succeeded, and
                # the answer to that append will show it.
                if play is not None and not play.is_ending:
                    self._abandon(play)

    async def _give_back_all(self) -> None:
        """Give all leases back, so that other collectors need not wait until they expire."""
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._outbox.flush()
                plays = self._plays.values()
                items = [_return_item(p, DropReason.SHUTDOWN, failed=False) for p in plays]
                for item in items:
                    self._counters.count_return(item.reason)
                if items:
                    await self._replay.give_back(self._settings.run, items)
        except (DialoopError, TimeoutError):
            log.warning("Leases are left to expire.", extra={"num_leases": len(self._plays)})
            for play in self._plays.values():
                self._count_lost(play)
        self._plays.clear()


def _return_item(
    play: GroupPlay, reason: str, *, failed: bool, failed_members: tuple[int, ...] = ()
) -> ReturnItem:
    return ReturnItem(
        lease_id=play.lease_id,
        reason=reason,
        num_trajectories=play.num_played - play.num_counted,
        failed=failed,
        failed_members=failed_members,
    )
