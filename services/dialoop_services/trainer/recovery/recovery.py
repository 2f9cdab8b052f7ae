"""Doing again, on the same groups, what a killed trainer did after its newest checkpoint.

The journal says what that was and the queue still has the groups, so the weights come out bit for
bit as they were published: no policy is taken back, and what was sampled from it stays fresh. Where
a group is gone, the run goes on from what could be redone, in a new lineage.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import TYPE_CHECKING

from dialoop.clients.replay import ReturnItem
from dialoop.reasons import DropReason
from dialoop.trajectory import Stage

from dialoop_services.trainer.data.batches import Batch
from dialoop_services.trainer.data.leases import WORKER
from dialoop_services.trainer.recovery.checkpoint import published_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.clients.replay import GroupLease
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.evaluation_schedule import EvaluationSchedule
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.job.policy_versions import VersionedPublisher
    from dialoop_services.trainer.job.train_steps import TrainSteps
    from dialoop_services.trainer.recovery.checkpoint import LatestPolicy
    from dialoop_services.trainer.recovery.journal import JournalEntry
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class Recovery:
    """Used once, between a restore and the next train step."""

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
        """Catch up with the journal, give back what was in work, and publish where that leads."""
        state, held = self._state, self._held
        if not state.num_policy_versions:  # killed in its warm start
            self._versions.go_on(await self._announced())
            return
        entries = self._checkpointer.journal.entries()
        # All at once: a lease that ran out is a failed delivery of its group until we are back.
        held.hold(one for entry in entries for one in entry.lease_ids)
        async with held.kept():
            await held.extend()
            num_redone = await self._redo_all(entries)
            held.let_go(one for entry in entries[num_redone:] for one in entry.lease_ids)
            if self._settings.mode == "rl":
                await self._return_the_rest(entries)
            redone = state.policy_version
            self._versions.go_on(await self._announced())
            await self._versions.publish_again()
            if entries or state.policy_version != redone:
                # Nobody has to redo this once more; and where some are gone the journal no longer
                # says what was done.
                await self._checkpointer.checkpoint()

    async def _redo_all(self, entries: Sequence[JournalEntry]) -> int:
        """How many entries were redone; 0 with the checkpoint's weights where they came out other.

        Rows and trajectories of all but the newest train step have been written down before.
        """
        num_recorded = self._records.newest_train_step()
        live = published_policy(self._settings.run_dir)
        for number, entry in enumerate(entries):
            if not await self._redo(entry, is_recorded=entry.train_step <= num_recorded):
                log.warning("A group to redo is gone.", extra={"train_step": entry.train_step})
                return number
            if live is not None and not await self._is_as_published(live):
                log.error("Redone weights differ.", extra={"policy_version": str(live.version)})
                await self._checkpointer.restore()
                return 0
        return len(entries)

    async def _redo(self, entry: JournalEntry, *, is_recorded: bool) -> bool:
        """Do once more what one entry says; False where the queue has lost its groups."""
        state = self._state
        if entry.evaluated is not None:
            self._schedule.mark_evaluated(entry.evaluated, judged=entry.judged, is_redone=True)
            return True
        batch = await self._batch(entry)
        if batch is None:
            return False
        since = state.num_train_steps
        row = await self._steps.learn(batch) if entry.lease_ids else {}
        self._schedule.schedule_evaluation(since=since)
        self._checkpointer.mark_trained(entry.trained)
        if entry.policy_version != state.policy_version:
            state.policy_version = entry.policy_version
            state.num_policy_versions += 1
        if row and not is_recorded:
            await self._steps.record(batch, row, is_redone=True)
        await self._steps.drop(batch)
        return True

    async def _batch(self, entry: JournalEntry) -> Batch | None:
        """The batch as it was, but for dropped groups that the queue has let go of since."""
        trained = await self._reopened(entry.trained)
        if trained is None:
            return None
        dropped = {why: await self._reopened(ids) or () for why, ids in entry.dropped.items()}
        return Batch(
            train=trained,
            already_consumed=(),
            dropped={why: leases for why, leases in dropped.items() if leases},
        )

    async def _reopened(self, lease_ids: tuple[str, ...]) -> tuple[GroupLease, ...] | None:
        """The groups of leases that are still the trainer's; None when one is lost."""
        if not lease_ids:
            return ()
        found = await self._replay.reopen_leases(
            self._settings.run, lease_ids, lease_s=self._settings.lease_s
        )
        if found.lost:
            return None
        self._held.hold(lease_ids)
        return found.leases

    async def _return_the_rest(self, entries: Sequence[JournalEntry]) -> None:
        """Give back, to its place in the queue, what the killed trainer held and nobody redid.

        What was in work when it was killed may be what killed it: that counts as a failure.
        """
        run = self._settings.run
        listed = await self._replay.list_leases(run, Stage.SCORED, worker=WORKER)
        done = {lease_id for entry in entries for lease_id in entry.lease_ids}
        items = [
            ReturnItem(lease_id=one, reason=DropReason.TRAINER_RESTARTED, failed=one not in done)
            for one in listed
            if one not in self._held.lease_ids
        ]
        if items:
            await self._replay.give_back(run, items)

    async def _announced(self) -> PolicyVersion | None:
        """The newest version that the queue knows: a publish is announced to it first."""
        return (await self._replay.get_stats(self._settings.run)).policy_version

    async def _is_as_published(self, live: LatestPolicy) -> bool:
        """Whether the present weights are those of the live version, or of another version."""
        if self._state.policy_version != live.version:
            return True
        # Next to the published ones, and of the same name: of LoRA that is the adapter alone.
        directory = self._settings.run_dir / "redone"
        weights = await asyncio.to_thread(self._learner.export, directory / live.file_name)
        shutil.rmtree(directory)
        return weights.sha256 == live.sha256
