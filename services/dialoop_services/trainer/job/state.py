"""Where a job stands: its weights' version, its progress, and the leases it still owes an answer.

Everything that changes the published policy or writes a checkpoint goes through here, between
train steps.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dialoop.clients.replay import ReturnItem
from dialoop.sequences import PolicyVersion

from dialoop_services.trainer.data.leases import HeldLeases
from dialoop_services.trainer.job.early_stop import EarlyStop
from dialoop_services.trainer.job.phases import PhaseClock
from dialoop_services.trainer.job.placement import Split
from dialoop_services.trainer.recovery.checkpoint import (
    Progress,
    lineage_after_restore,
    published_version,
)
from dialoop_services.trainer.recovery.journal import Entry, Journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dialoop.clients.replay import ReplayClient
    from dialoop.clients.trainer import Phase

    from dialoop_services.trainer.data.batches import Batch
    from dialoop_services.trainer.data.warm_start import Demonstrations
    from dialoop_services.trainer.job.evaluation import Evaluator
    from dialoop_services.trainer.job.placement import Placement
    from dialoop_services.trainer.job.status import StatusBoard
    from dialoop_services.trainer.learner.ranked_learner import AnyLearner
    from dialoop_services.trainer.publish.publisher import Published, Publisher
    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.recovery.checkpoint import Checkpoints
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

FIRST_LINEAGE = "main"

DEAD_LETTERS_FORGOTTEN = "DEAD_LETTERS_FORGOTTEN"
"""The alarm of a queue that had too many dead letters to keep them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """What a job works with."""

    learner: AnyLearner
    demonstrations: Demonstrations | None
    replay: ReplayClient
    publisher: Publisher
    evaluator: Evaluator
    checkpoints: Checkpoints
    records: RunRecords
    board: StatusBoard
    placement: Placement = field(default_factory=Split)


class Standing:
    """Owns the progress; its methods are called by whoever holds `between_steps`."""

    def __init__(self, settings: TrainerSettings, parts: JobParts) -> None:
        self._settings = settings
        self._parts = parts
        self._board = parts.board
        self._replay = parts.replay
        self._publisher = parts.publisher
        # Leases of groups whose gradient is in the weights but not yet in a checkpoint.
        self._unsaved_leases: list[str] = []
        self._clock = PhaseClock()
        self.journal = Journal(parts.checkpoints)
        self.progress = Progress(policy_version=PolicyVersion(lineage=FIRST_LINEAGE, number=0))
        self.held = HeldLeases(settings.run, parts.replay, lease_s=settings.lease_s)
        # Held by a train step and by whoever wants the weights to stand still between two.
        self.between_steps = asyncio.Lock()

    async def restore(self) -> bool:
        """Load the newest checkpoint, if there is one, and let go of what it contains."""
        restored = await asyncio.to_thread(self._parts.checkpoints.restore, self._parts.learner)
        if restored is None:
            # Killed before its first checkpoint: what was published may have been sampled from.
            live = published_version(self._settings.run_dir)
            version = lineage_after_restore(self.progress.policy_version, live)
            self.progress.policy_version = version
            self._parts.records.rewind(num_train_steps=0, num_warm_start_steps=0)
            return False
        self.progress = restored
        self._unsaved_leases.clear()
        self.held.let_go(self.held.lease_ids)
        self._board.num_train_steps = restored.num_train_steps
        self._board.num_warm_start_steps = restored.num_warm_start_steps
        await self._replay.acknowledge(self._settings.run, restored.consumed_lease_ids)
        return True

    def go_on(self, announced: PolicyVersion | None) -> None:
        """Go on under a version that nobody has seen with other weights.

        `announced` is the newest that the queue knows.
        """
        progress, live = self.progress, published_version(self._settings.run_dir)
        progress.policy_version = lineage_after_restore(progress.policy_version, live, announced)
        self._parts.records.rewind(
            num_train_steps=progress.num_train_steps,
            num_warm_start_steps=progress.num_warm_start_steps,
            evaluations=progress.evaluations,
        )
        log.info(
            "Resuming.",
            extra={
                "train_step": progress.num_train_steps,
                "policy": str(progress.policy_version),
            },
        )

    async def publish_again(self) -> None:
        """Publish the restored weights under the version they go on as."""
        version, trained = self.progress.policy_version, tuple(self._unsaved_leases)
        self._announce(await self._publisher.publish(version, trained_lease_ids=trained))

    async def publish_first(self) -> None:
        """Publish the run's first policy, which a checkpoint holds before anybody hears of it."""
        progress = self.progress
        version = progress.policy_version
        progress.policy_version = replace(version, number=version.number + 1)
        progress.num_policy_versions = 1
        await self.checkpoint()
        await self.publish_again()

    async def publish_next(self, batch: Batch | None = None) -> Published:
        """Publish the present weights, of a batch just trained, as a new version."""
        version = self.progress.policy_version
        version = replace(version, number=version.number + 1)
        # Claimed whatever comes: a number that failed never comes back with other weights.
        self.progress.policy_version = version
        trained = () if batch is None else batch.trained_lease_ids
        self.settle(trained)
        self.note(batch)
        published = await self._publisher.publish(version, trained_lease_ids=trained)
        self.progress.num_policy_versions += 1
        self._announce(published)
        return published

    def is_due(self, every: int, *, since: int) -> bool:
        """Whether the step taken since that one is one of every so many, and not the last."""
        step = self.progress.num_train_steps
        is_new = since < step < self._settings.num_steps
        return bool(is_new and every and step % every == 0)

    def owe_evaluation(self, *, since: int) -> int | None:
        """The step taken since that one, if tasks are to be evaluated on after it.

        That is owed until it is settled, by this process or another.
        """
        is_due = self.is_due(self._settings.evaluation.every, since=since)
        if not (is_due and self._settings.evaluation.num_tasks):
            return None
        self.progress.due_evaluations.append(self.progress.num_train_steps)
        return self.progress.num_train_steps

    def settle_evaluation(self, due: int, *, judged: float | None, is_redone: bool = False) -> None:
        """The evaluation that was due after a train step has come out so, or to nothing (None)."""
        if due in self.progress.due_evaluations:
            self.progress.due_evaluations.remove(due)
        if judged is not None:
            EarlyStop.of(self._settings).observe(judged, self.progress)
        if not is_redone:
            self.note(evaluated=due, judged=judged)

    def settle_recorded_evaluations(self) -> None:
        """Judge those that a kill left with a row of metrics, and with nothing else."""
        for due in tuple(self.progress.due_evaluations):
            row = self._parts.records.evaluation_due_after(due)
            if row is not None:
                judged = row["mean_reward"] if row["num_trajectories"] else None
                self.settle_evaluation(due, judged=judged)

    def note(
        self,
        batch: Batch | None = None,
        *,
        evaluated: int | None = None,
        judged: float | None = None,
    ) -> None:
        """Write into the journal what has been done, before anybody outside hears of it.

        Only RL redoes its steps, and begins with its first policy.
        """
        if self._settings.mode != "rl" or not self.progress.num_policy_versions:
            return
        dropped = () if batch is None else batch.dropped.items()
        self.journal.add(
            Entry(
                train_step=self.progress.num_train_steps,
                policy_version=self.progress.policy_version,
                trained=() if batch is None else batch.trained_lease_ids,
                dropped={why: tuple(one.lease_id for one in leases) for why, leases in dropped},
                evaluated=evaluated,
                judged=judged,
            )
        )

    def settle(self, lease_ids: tuple[str, ...]) -> None:
        """The gradient of these groups is in the weights: the next checkpoint lets go of them."""
        self._unsaved_leases.extend(lease_ids)

    async def checkpoint(self) -> Path:
        """Save everything, then acknowledge what the checkpoint contains."""
        progress = self.progress
        if progress.num_policy_versions:  # in a warm start the queue may not be there yet
            progress.cursor = await self._cursor()
        progress.consumed_lease_ids = list(self._unsaved_leases)
        self._clock.count(progress.phase_seconds)
        path = await asyncio.to_thread(
            self._parts.checkpoints.save, self._parts.learner, self.progress
        )
        if progress.num_policy_versions:
            await self._replay.acknowledge(self._settings.run, self._unsaved_leases)
        self.held.let_go(self._unsaved_leases)
        self._unsaved_leases.clear()
        # What was acknowledged cannot come back; the lists start anew after the next checkpoint.
        progress.consumed_lease_ids.clear()
        progress.consumed_group_ids.clear()
        return path

    async def _cursor(self) -> str:
        """The data position; and a word on it when groups that could not be used are gone."""
        stats = await self._replay.get_stats(self._settings.run)
        dropped = (stats.training.num_groups_dropped, stats.evaluation.num_groups_dropped)
        num_forgotten = sum(reasons.get("dead_letter_forgotten", 0) for reasons in dropped)
        self._board.sound(DEAD_LETTERS_FORGOTTEN, on=num_forgotten > 0)
        if num_forgotten:
            log.warning("Dead letters were forgotten.", extra={"num_groups": num_forgotten})
        return stats.cursor

    async def stand_down(self) -> None:
        """The last thing a stopped job does: save, and give back what it leased and did not train.

        So that the next trainer has it at once, not when the leases have run out.
        """
        async with self.between_steps:
            if self.progress.num_policy_versions or self.progress.num_warm_start_steps:
                await self.checkpoint()
            untrained = self.held.lease_ids
            if untrained:
                items = [
                    ReturnItem(lease_id=lease, reason="trainer_stopped") for lease in untrained
                ]
                await self._replay.give_back(self._settings.run, items)
                self.held.let_go(untrained)
        log.info(
            "Stopped between two train steps.",
            extra={"train_step": self.progress.num_train_steps, "num_returned": len(untrained)},
        )

    def _announce(self, published: Published) -> None:
        progress = self.progress
        progress.max_logprob_difference = max(
            progress.max_logprob_difference, published.max_logprob_difference
        )
        self._board.published(published)
        self._parts.records.metric(
            "publish",
            train_step=progress.num_train_steps,
            policy_version=published.policy_version,
            publish_s=published.publish_s,
            max_logprob_difference=published.max_logprob_difference,
            num_replicas=published.num_replicas,
            num_bytes=published.weights.num_bytes,
        )

    @contextmanager
    def phase(self, phase: Phase, name: str) -> Iterator[None]:
        """Show the phase and count its seconds."""
        self._board.phase = phase
        with self._clock.phase(name, self.progress.phase_seconds):
            yield
