"""Save and restore the job: its state, the journal since the checkpoint, and its leases."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dialoop.clients.replay import ReturnItem
from dialoop.reasons import DropReason

from dialoop_services.trainer.data.batches import Batch, figures_of_dropped
from dialoop_services.trainer.data.queue_client import HeldLeases
from dialoop_services.trainer.job.state import PhaseTimer
from dialoop_services.trainer.recovery.checkpoint import (
    Journal,
    JournalEntry,
    lineage_after_restore,
    published_policy,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.recovery.checkpoint import Saving
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

DEAD_LETTERS_FORGOTTEN = "DEAD_LETTERS_FORGOTTEN"
"""The alarm that the queue deleted dead letters because it had too many."""


class Checkpointer:
    """Saves and restores the job's state and the learner's.

    Called between train steps; at most one checkpoint is saved at a time.
    """

    def __init__(self, settings: TrainerSettings, parts: JobParts) -> None:
        self._settings = settings
        self._parts = parts
        self._replay = parts.replay
        self.state = parts.board.state
        self.timer = PhaseTimer(self.state)
        self.journal = Journal(parts.checkpoints)
        self.held = HeldLeases(settings.run, parts.replay, lease_s=settings.lease_s)
        self._saving: asyncio.Task[Path] | None = None
        self.before_saving: Callable[[], Awaitable[None]] | None = None
        """Awaited before a checkpoint: until the publish of the newest train step has ended."""

    async def restore(self) -> bool:
        """Load the newest checkpoint and acknowledge its groups; return False without one."""
        state = self.state
        restored = await asyncio.to_thread(self._parts.checkpoints.restore, self._parts.learner)
        if restored is None:
            # Killed before its first checkpoint: engines may have sampled from what was published.
            live = published_policy(self._settings.run_dir)
            state.policy_version = lineage_after_restore(
                state.policy_version, None if live is None else live.version
            )
            self._parts.records.rewind(num_train_steps=0, num_warm_start_steps=0)
            return False
        state.become(restored)
        # The last checkpoint is older than these: a job that has ended does not measure them again.
        state.evaluations |= self._parts.records.evaluated_after(state.num_train_steps)
        self.held.release(self.held.lease_ids)
        await self._replay.acknowledge(self._settings.run, state.consumed_lease_ids)
        state.consumed_lease_ids.clear()
        return True

    def mark_trained(self, lease_ids: Iterable[str]) -> None:
        """Mark groups whose gradient is in the weights: the next checkpoint acknowledges them."""
        self.state.consumed_lease_ids.extend(lease_ids)

    def record(
        self,
        batch: Batch | None = None,
        *,
        evaluated: int | None = None,
        judged: float | None = None,
    ) -> None:
        """Write what was done into the journal, before another service learns of it.

        Only RL repeats its steps after a kill, and only those after its first policy.
        """
        if self._settings.mode != "rl" or not self.state.num_policy_versions:
            return
        self.journal.add(
            JournalEntry(
                train_step=self.state.num_train_steps,
                policy_version=self.state.policy_version,
                trained=() if batch is None else batch.trained_lease_ids,
                dropped={} if batch is None else batch.dropped_lease_ids,
                candidates={} if batch is None else batch.candidates,
                depth=self.state.depth,
                oldest=self.state.oldest,
                evaluated=evaluated,
                judged=judged,
            )
        )

    def record_dropped(self, batch: Batch, num_in_a_row: tuple[int, int]) -> None:
        """Write which groups are about to be dropped before a train step, and keep their figures.

        After a kill the metrics of that step would lack them, as the queue has them no more.
        """
        figures = figures_of_dropped(batch)
        self.journal.add(
            JournalEntry(
                train_step=self.state.num_train_steps,
                policy_version=self.state.policy_version,
                dropped=batch.dropped_lease_ids,
                figures=figures,
                num_in_a_row=num_in_a_row,
                num_empty_batches=self.state.num_empty_batches,
            )
        )
        self.state.dropped_candidates += figures

    async def checkpoint(self) -> Path:
        """Save everything, then acknowledge what the checkpoint contains; return its folder."""
        await self.begin()
        assert self._saving is not None
        try:
            return await asyncio.shield(self._saving)
        except Exception:
            self._saving = None  # the caller has the error
            raise

    async def begin(self) -> None:
        """Copy everything for a checkpoint; save and acknowledge beside the train steps to come.

        It waits for an earlier checkpoint, and raises the error of one that failed.
        """
        await self.wait_until_saved()
        if self.before_saving is not None:
            await self.before_saving()
        state, has_published = self.state, self.state.num_policy_versions > 0
        if has_published:  # in a warm start the queue may not be there yet
            state.cursor = await self._cursor()
        checkpoints = self._parts.checkpoints
        captured = await asyncio.to_thread(checkpoints.capture, self._parts.learner, state)
        self.timer.count()
        checkpoints.begin(captured, state)  # nothing awaits before what is saved is chosen
        consumed = tuple(state.consumed_lease_ids)
        self._saving = asyncio.create_task(self._save(captured, consumed, has_published))

    async def _save(self, saving: Saving, consumed: tuple[str, ...], has_published: bool) -> Path:
        path = await asyncio.to_thread(self._parts.checkpoints.finish, saving)
        state = self.state
        if has_published:
            await self._replay.acknowledge(self._settings.run, consumed)
        self.held.release(consumed)
        del state.consumed_lease_ids[: len(consumed)]  # others come behind them
        # Not the groups: Redis can lose the last second of what it acknowledged.
        bound = self._settings.max_staleness
        state.forget_consumed(state.oldest if bound == "auto" else bound)
        return path

    async def wait_until_saved(self) -> None:
        """Wait for the checkpoint that is being saved; raise its error, also when repeated."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def close(self) -> None:
        """Wait for a checkpoint that is being saved, also for a job that has failed."""
        if self._saving is None:
            return
        await asyncio.wait({self._saving})
        if (error := self._saving.exception()) is not None:
            log.error("The last checkpoint failed.", exc_info=error)

    async def restore_cursor(self) -> None:
        """Give a queue that has lost its state the checkpoint's position in the data.

        Call it before a policy is announced, since collectors offer tasks from then on. A task from
        there on whose group was trained may be played again: the group is then acknowledged.
        """
        cursor, run = self.state.cursor, self._settings.run
        if not cursor:
            return
        stats = await self._replay.get_stats(run)
        if stats.policy_version is None and not stats.cursor:
            await self._replay.offer_tasks(run, (), expected_cursor="", next_cursor=cursor)
            log.warning("The queue had lost its state.", extra={"cursor": cursor})

    async def shutdown(self) -> None:
        """Save, and give back the groups that the stopped job leased and did not train.

        The next trainer then has them at once, not only after the leases have expired.
        """
        if self.state.num_policy_versions or self.state.num_warm_start_steps:
            await self.checkpoint()
        untrained = self.held.lease_ids
        if untrained:
            items = [
                ReturnItem(lease_id=lease, reason=DropReason.TRAINER_STOPPED) for lease in untrained
            ]
            await self._replay.give_back(self._settings.run, items)
            self.held.release(untrained)
        log.info(
            "Stopped between two train steps.",
            extra={"train_step": self.state.num_train_steps, "num_returned": len(untrained)},
        )

    async def _cursor(self) -> str:
        """Return up to where all tasks are done, and raise or end the alarm of deleted letters.

        Tasks that are offered and not done are beyond it: a queue that loses them has them again.
        """
        stats = await self._replay.get_stats(self._settings.run)
        dropped = (stats.training.num_groups_dropped, stats.evaluation.num_groups_dropped)
        num_forgotten = sum(reasons.get(DropReason.DEAD_LETTER_FORGOTTEN, 0) for reasons in dropped)
        self._parts.board.raise_alarm(DEAD_LETTERS_FORGOTTEN, on=num_forgotten > 0)
        if num_forgotten:
            log.warning("Dead letters were forgotten.", extra={"num_groups": num_forgotten})
        return stats.settled_cursor
