"""Repeat, on the same groups, the steps that a killed trainer took after its newest checkpoint.

The journal lists the steps and the queue still has the groups, so the recovered weights are bit for
bit the published ones: no policy is taken back, and data sampled from it stays fresh. Where a group
is gone, the run continues from the steps recovered so far, in a new lineage.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import TYPE_CHECKING

from dialoop.clients.replay import GroupLease, ReturnItem
from dialoop.reasons import DropReason
from dialoop.trajectory import Stage

from dialoop_services.trainer.data.batches import Batch
from dialoop_services.trainer.data.queue_client import WORKER
from dialoop_services.trainer.recovery.checkpoint import published_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.evaluation_schedule import EvaluationSchedule
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.job.policy_versions import VersionedPublisher
    from dialoop_services.trainer.job.train_steps import TrainSteps
    from dialoop_services.trainer.recovery.checkpoint import JournalEntry, LatestPolicy
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class Recovery:
    """The recovery of a run, done once between a restore and the next train step."""

    def __init__(
        self,
        settings: TrainerSettings,
        parts: JobParts,
        checkpointer: Checkpointer,
        versions: VersionedPublisher,
        schedule: EvaluationSchedule,
        steps: TrainSteps,
    ) -> None:
        self._settings = settings
        self._learner = parts.learner
        self._replay = parts.replay
        self._records = parts.records
        self._checkpointer = checkpointer
        self._held = checkpointer.held
        self._state = checkpointer.state
        self._versions = versions
        self._schedule = schedule
        self._steps = steps

    async def run(self) -> None:
        """Repeat the journal's steps, give back other leased groups, and publish the result."""
        state, held = self._state, self._held
        if not state.num_policy_versions:  # killed in its warm start
            self._versions.resume(await self._newest_announced())
            return
        entries = self._checkpointer.journal.entries()
        # All at once: the queue counts an expired lease as a failed delivery of its group.
        held.hold(lease_id for entry in entries for lease_id in entry.lease_ids)
        async with held.keep():
            await held.extend()
            num_recovered = await self._recover_all(entries)
            held.release(
                lease_id for entry in entries[num_recovered:] for lease_id in entry.lease_ids
            )
            if self._settings.mode == "rl":
                await self._return_the_rest(entries)
            recovered = state.policy_version
            self._versions.resume(await self._newest_announced())
            await self._versions.publish_again()
            if entries or state.policy_version != recovered:
                # The next restart need not repeat these steps. And if some groups are gone, the
                # journal no longer tells what was done.
                await self._checkpointer.checkpoint()

    async def _recover_all(self, entries: Sequence[JournalEntry]) -> int:
        """Return how many entries were recovered.

        If the weights differ from the published ones, it restores the checkpoint and returns 0. All
        but the newest batch are already recorded in the run's files.
        """
        recorded = self._records.recorded_versions()
        live = published_policy(self._settings.run_dir)
        for number, entry in enumerate(entries):
            is_new = entry.policy_version != self._state.policy_version
            if not await self._recover(entry, is_recorded=entry.policy_version in recorded):
                log.warning("A group to recover is gone.", extra={"train_step": entry.train_step})
                return number
            if is_new and live is not None and not await self._is_as_published(live):
                log.error(
                    "Recovered weights differ from the published ones.",
                    extra={"policy_version": str(live.version)},
                )
                await self._checkpointer.restore()
                return 0
        return len(entries)

    async def _recover(self, entry: JournalEntry, *, is_recorded: bool) -> bool:
        """Repeat what one entry says; return False if the queue has lost its groups."""
        state = self._state
        if entry.is_before_a_step:
            self._steps.count_dropped(entry)
        if entry.evaluated is not None:
            self._schedule.mark_evaluated(entry.evaluated, judged=entry.judged, is_recovered=True)
            return True
        batch = await self._batch(entry)
        if batch is None:
            return False
        since = state.num_train_steps
        row = await self._steps.learn(batch) if entry.trained else {}
        if not entry.is_before_a_step:  # they are chosen after it
            state.depth, state.oldest = entry.depth, entry.oldest
        self._schedule.schedule_evaluation(since=since)
        self._checkpointer.mark_trained(entry.trained)
        if entry.policy_version != state.policy_version:
            state.policy_version = entry.policy_version
            state.num_policy_versions += 1
        if row.get("num_updates") and not is_recorded:
            await self._steps.record(
                batch, row, state.num_train_steps, state.policy_version, is_recovered=True
            )
        await self._steps.drop(batch, is_recovered=True)
        return True

    async def _batch(self, entry: JournalEntry) -> Batch | None:
        """Return the entry's batch; without dropped groups that the queue no longer has."""
        trained = await self._reopen(entry.trained)
        if trained is None:
            return None
        dropped = {why: await self._reopen(ids) or () for why, ids in entry.dropped.items()}
        return Batch(
            train=trained,
            already_consumed=(),
            dropped={why: leases for why, leases in dropped.items() if leases},
            candidates=entry.candidates,
        )

    async def _reopen(self, lease_ids: tuple[str, ...]) -> tuple[GroupLease, ...] | None:
        """Return the leases with their groups again; None when one is no longer the trainer's."""
        if not lease_ids:
            return ()
        answer = await self._replay.reopen_leases(
            self._settings.run, lease_ids, lease_s=self._settings.lease_s
        )
        if answer.lost:
            return None
        self._held.hold(lease_ids)
        return answer.leases

    async def _return_the_rest(self, entries: Sequence[JournalEntry]) -> None:
        """Give back the groups that the killed trainer held and that were not recovered.

        A group that is in no journal entry may be what killed the trainer, so it counts as a
        failed delivery.
        """
        run = self._settings.run
        listed = await self._replay.list_leases(run, Stage.SCORED, worker=WORKER)
        done = {lease_id for entry in entries for lease_id in entry.lease_ids}
        items = [
            ReturnItem(lease_id=i, reason=DropReason.TRAINER_RESTARTED, failed=i not in done)
            for i in listed
            if i not in self._held.lease_ids
        ]
        if items:
            await self._replay.give_back(run, items)

    async def _newest_announced(self) -> PolicyVersion | None:
        """Return the newest version that the queue knows: a publish announces to it first."""
        return (await self._replay.get_stats(self._settings.run)).policy_version

    async def _is_as_published(self, live: LatestPolicy) -> bool:
        """Return False if the current weights have the live version and differ from it."""
        if self._state.policy_version != live.version:
            return True
        # The same file name, because it decides whether LoRA exports the adapter alone.
        directory = self._settings.run_dir / "recovered"
        weights = await asyncio.to_thread(self._learner.export, directory / live.file_name)
        shutil.rmtree(directory)
        return weights.sha256 == live.sha256
