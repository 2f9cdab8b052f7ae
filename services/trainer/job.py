"""The job: warm start, publish, evaluate, train, publish, ..., evaluate.

    warm start -> publish -> evaluate -+-> lease a batch -> train step -> publish -+-> evaluate
                                       |                                           |
                                       +<------ checkpoint, then acknowledge <-----+

The queue hands out work as soon as the first publish announced a policy, so collectors are already
playing while the first evaluation runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.clients.trainer import Phase
from dialoop.errors import DialoopError
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Group, Stage

from services.trainer.batches import Batch, sort_batch
from services.trainer.checkpoint import Progress, lineage_after_restore, published_version
from services.trainer.evaluation import Evaluation, EvaluationPlan
from services.trainer.leases import HeldLeases
from services.trainer.phases import PhaseClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from dialoop.clients.replay import GroupLease, ReplayClient
    from dialoop.sequences import Sequence

    from services.trainer.checkpoint import Checkpoints
    from services.trainer.evaluation import Evaluator
    from services.trainer.learner import Learner, TrainStepReport
    from services.trainer.publisher import Published, Publisher
    from services.trainer.records import RunRecords
    from services.trainer.settings import TrainerSettings
    from services.trainer.status import StatusBoard

log = logging.getLogger(__name__)

FIRST_LINEAGE = "main"
_LEASE_WAIT_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """What a job works with."""

    learner: Learner
    demonstrations: Iterator[list[Sequence]]
    replay: ReplayClient
    publisher: Publisher
    evaluator: Evaluator
    checkpoints: Checkpoints
    records: RunRecords
    board: StatusBoard


class TrainingJob:
    """Runs the phases in order; one instance per process, driven by one task."""

    def __init__(self, settings: TrainerSettings, parts: JobParts) -> None:
        self._settings = settings
        self._learner = parts.learner
        self._demonstrations = parts.demonstrations
        self._replay = parts.replay
        self._publisher = parts.publisher
        self._evaluator = parts.evaluator
        self._checkpoints = parts.checkpoints
        self._records = parts.records
        self._board = parts.board
        self._progress = Progress(policy_version=PolicyVersion(lineage=FIRST_LINEAGE, number=0))
        # Leases of groups whose gradient is in the weights but not yet in a checkpoint.
        self._unsaved_leases: list[str] = []
        self._held = HeldLeases(settings.run, parts.replay, lease_s=settings.lease_s)
        self._clock = PhaseClock()
        # Held by a train step and by whoever wants the weights to stand still between two.
        self._between_steps = asyncio.Lock()
        self._asked_for: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Run to the end and write trainer.json."""
        async with self._between_steps:
            await self._run_to_first_policy()
        with self._phase(Phase.EVALUATING, "evaluate_before"):
            await self._evaluate_both("before")
        with self._phase(Phase.TRAINING, "train"):
            await self._train()
        with self._phase(Phase.EVALUATING, "evaluate_after"):
            await self._evaluate_both("after")
        num_parameters = self._learner.num_parameters
        self._records.write_result({**self._progress.result(), "num_parameters": num_parameters})
        self._board.phase = Phase.DONE

    async def publish(self) -> Published:
        """Publish the present weights as a new version, between train steps."""
        return await self._to_the_end(self._publish_next)

    async def checkpoint(self) -> Path:
        """Save everything between train steps, then acknowledge what the checkpoint contains."""
        return await self._to_the_end(self._checkpoint)

    async def _to_the_end(self, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Act between train steps; a caller who leaves must not leave half of it behind."""

        async def act_alone() -> T:
            async with self._between_steps:
                return await act()

        acting = asyncio.create_task(act_alone())
        self._asked_for.add(acting)
        acting.add_done_callback(self._asked_for.discard)
        return await asyncio.shield(acting)

    async def _checkpoint(self) -> Path:
        progress = self._progress
        progress.cursor = (await self._replay.get_stats(self._settings.run)).cursor
        progress.consumed_lease_ids = list(self._unsaved_leases)
        self._clock.count(progress.phase_seconds)
        path = await asyncio.to_thread(self._checkpoints.save, self._learner, progress)
        await self._replay.acknowledge(self._settings.run, self._unsaved_leases)
        self._held.let_go(self._unsaved_leases)
        self._unsaved_leases.clear()
        # What was acknowledged cannot come back; the lists start anew after the next checkpoint.
        progress.consumed_lease_ids.clear()
        progress.consumed_group_ids.clear()
        return path

    async def evaluate(self, plan: EvaluationPlan) -> Evaluation:
        """Evaluate the live policy and record the result under the plan's label."""
        step = self._progress.num_train_steps
        result = await self._evaluator.evaluate(plan, train_step=step)
        row = result.row()
        self._records.metric(
            "evaluation",
            train_step=step,
            policy_version=result.newest,
            label=plan.label,
            **row,
        )
        return result

    async def _run_to_first_policy(self) -> None:
        """Restore, or warm start and publish; before it there is nothing to publish or save."""
        await self._restore()
        with self._phase(Phase.WARM_START, "warm_start"):
            await self._warm_start()
        if not self._progress.num_policy_versions:
            with self._phase(Phase.EVALUATING, "publish_first"):
                await self._publish_next()
                await self._checkpoint()

    async def _restore(self) -> None:
        live = published_version(self._settings.run_dir)
        restored = await asyncio.to_thread(self._checkpoints.restore, self._learner)
        if restored is None:
            # Killed before its first checkpoint: what was published may have been sampled from.
            version = lineage_after_restore(self._progress.policy_version, live)
            self._progress.policy_version = version
            return
        # A publish is announced to the queue first, so the queue may know one that no file names.
        announced = (await self._replay.get_stats(self._settings.run)).policy_version
        version = lineage_after_restore(restored.policy_version, live, announced)
        self._progress = restored
        self._progress.policy_version = version
        self._board.num_train_steps = restored.num_train_steps
        self._board.num_warm_start_steps = restored.num_warm_start_steps
        await self._replay.acknowledge(self._settings.run, restored.consumed_lease_ids)
        log.info(
            "Resuming.", extra={"train_step": restored.num_train_steps, "policy": str(version)}
        )
        with self._phase(Phase.EVALUATING, "publish_restored"):
            self._announce(await self._publisher.publish(version))

    async def _warm_start(self) -> None:
        progress = self._progress
        while progress.num_warm_start_steps < self._settings.warm_start_steps:
            await self._board.wait_while_paused()
            batch = next(self._demonstrations)
            report = await asyncio.to_thread(self._learner.warm_start_step, batch)
            progress.num_warm_start_steps += 1
            self._board.num_warm_start_steps = progress.num_warm_start_steps
            if progress.num_warm_start_steps % 10 == 0:
                self._records.metric(
                    "warm_start",
                    train_step=progress.num_warm_start_steps,
                    policy_version=None,
                    loss=report.loss,
                    learning_rate=report.step.learning_rate,
                )

    async def _train(self) -> None:
        last = self._settings.num_train_steps
        async with self._held.kept(), asyncio.TaskGroup() as background:
            while (step := self._progress.num_train_steps) < last:
                await self._board.wait_while_paused()
                started = time.perf_counter()
                leases = await self._lease()
                lease_s = time.perf_counter() - started
                # Whoever paused meanwhile wants no step to start; the leases are kept.
                await self._board.wait_while_paused()
                async with self._between_steps:
                    await self._train_step(leases, lease_s)
                    if self._is_due(self._settings.checkpoint_every, since=step):
                        await self._checkpoint()
                if self._is_due(self._settings.evaluate_every, since=step):
                    background.create_task(self._evaluate_while_training())
        await self.checkpoint()

    def _is_due(self, every: int, *, since: int) -> bool:
        """Whether the step just taken is one of every so many, and not the last."""
        step = self._progress.num_train_steps
        is_new = since < step < self._settings.num_train_steps
        return bool(is_new and every and step % every == 0)

    async def _evaluate_while_training(self) -> None:
        """An evaluation for the curve: without it training goes on."""
        try:
            await self.evaluate(EvaluationPlan.running(self._settings))
        except DialoopError as error:
            log.warning("A running evaluation failed.", extra={"reason": error.reason})

    async def _train_step(self, leases: tuple[GroupLease, ...], lease_s: float) -> None:
        version = self._progress.policy_version
        batch = sort_batch(
            leases,
            current=version,
            max_staleness=self._settings.max_staleness,
            consumed_group_ids=set(self._progress.consumed_group_ids),
            needs_advantages=self._learner.needs_advantages,
        )
        if batch.already_consumed:
            # Their gradient is in the weights, and only a checkpoint may let go of them.
            self._unsaved_leases.extend(lease.lease_id for lease in batch.already_consumed)
            await self._checkpoint()
        if not (batch.train or batch.dropped):
            return
        self._progress.num_train_steps += 1
        self._board.num_train_steps = self._progress.num_train_steps
        if batch.train:
            await self._update(batch, version, lease_s)
        # After the publish: a refunded credit starts a group, which is to be of the new policy.
        for reason, dropped in batch.dropped.items():
            await self._drop(dropped, reason)

    async def _update(self, batch: Batch, version: PolicyVersion, lease_s: float) -> None:
        temperature = batch.groups[0].trajectories[0].sampling.temperature or 1.0
        started = time.perf_counter()
        report = await asyncio.to_thread(
            self._learner.train_step, batch.sequences, current=version, temperature=temperature
        )
        train_s = time.perf_counter() - started
        self._count(batch, report, version)
        published = await self._publish_next(tuple(lease.lease_id for lease in batch.train))
        await self._record_groups(list(batch.groups), "trained")
        self._record_step(batch, report, published, version, lease_s=lease_s, train_s=train_s)

    async def _lease(self) -> tuple[GroupLease, ...]:
        """Wait for a whole batch."""
        while True:
            leased = await self._replay.lease_groups(
                self._settings.run,
                Stage.SCORED,
                worker="trainer",
                max_groups=self._settings.groups_per_train_step,
                min_groups=self._settings.groups_per_train_step,
                lease_s=self._settings.lease_s,
                wait_s=_LEASE_WAIT_S,
                max_staleness=self._settings.max_staleness,
            )
            if leased.leases:
                self._held.hold(lease.lease_id for lease in leased.leases)
                return leased.leases
            # A queue that lost all it knew gives out no work until it hears of a policy again.
            await self._publisher.announce(self._progress.policy_version)

    async def _drop(self, leases: tuple[GroupLease, ...], reason: str) -> None:
        lease_ids = [lease.lease_id for lease in leases]
        await self._replay.drop(self._settings.run, lease_ids, reason)
        self._held.let_go(lease_ids)
        await self._record_groups([lease.group for lease in leases], reason)

    async def _publish_next(self, trained_lease_ids: tuple[str, ...] = ()) -> Published:
        version = self._progress.policy_version
        version = replace(version, number=version.number + 1)
        # Claimed whatever comes: a number that failed never comes back with other weights.
        self._progress.policy_version = version
        self._unsaved_leases.extend(trained_lease_ids)
        published = await self._publisher.publish(version, trained_lease_ids=trained_lease_ids)
        self._progress.num_policy_versions += 1
        self._announce(published)
        return published

    def _announce(self, published: Published) -> None:
        progress = self._progress
        progress.max_logprob_difference = max(
            progress.max_logprob_difference, published.max_logprob_difference
        )
        self._board.published(published)
        self._records.metric(
            "publish",
            train_step=progress.num_train_steps,
            policy_version=published.policy_version,
            publish_s=published.publish_s,
            max_logprob_difference=published.max_logprob_difference,
            num_replicas=published.num_replicas,
        )

    def _count(self, batch: Batch, report: TrainStepReport, version: PolicyVersion) -> None:
        progress = self._progress
        staleness = batch.staleness(version)
        progress.staleness_histogram.update(staleness)
        progress.num_steps_with_older_data += any(age > 0 for age in staleness)
        progress.forks.update(batch.forks())
        progress.num_trained_tokens += report.num_trained_tokens
        progress.num_trained_trajectories += sum(g.num_trajectories for g in batch.groups)
        progress.consumed_group_ids.extend(g.group_id for g in batch.groups)

    async def _record_groups(self, groups: list[Group], outcome: str) -> None:
        await asyncio.to_thread(
            self._records.trajectories,
            [t for group in groups for t in group.trajectories],
            outcome=outcome,
            label="training",
            train_step=self._progress.num_train_steps,
        )

    def _record_step(
        self,
        batch: Batch,
        report: TrainStepReport,
        published: Published,
        trained: PolicyVersion,
        **seconds: float,
    ) -> None:
        dropped = [lease.group for leases in batch.dropped.values() for lease in leases]
        trajectories = [t for g in (*batch.groups, *dropped) for t in g.trajectories]
        staleness = list(batch.staleness(trained).elements())
        self._records.metric(
            "train",
            train_step=self._progress.num_train_steps,
            policy_version=published.policy_version,
            reward=sum(t.reward for t in trajectories) / len(trajectories),
            tool_call_rate=sum(t.num_tool_calls > 0 for t in trajectories) / len(trajectories),
            num_groups_trained=len(batch.train),
            num_groups_dropped=len(dropped),
            num_trained_tokens=report.num_trained_tokens,
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            loss=report.loss,
            grad_norm=report.grad_norm,
            num_updates=report.num_updates,
            num_refused=report.num_refused,
            publish_s=published.publish_s,
            **seconds,
            **report.metrics,
        )

    async def _evaluate_both(self, when: str) -> None:
        """Greedy and sampled accuracy on the held-out split, once per run."""
        for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            label = f"{when}_{how}"
            if self._settings.num_evaluation_tasks and label not in self._progress.evaluations:
                result = await self.evaluate(
                    EvaluationPlan.full(self._settings, label, temperature=temperature)
                )
                self._progress.evaluations[label] = {
                    "mean_reward": result.mean_reward,
                    "tool_call_rate": result.tool_call_rate,
                    "num_trajectories": result.num_trajectories,
                    "num_failed": result.num_failed,
                }

    @contextmanager
    def _phase(self, phase: Phase, name: str) -> Iterator[None]:
        self._board.phase = phase
        with self._clock.phase(name, self._progress.phase_seconds):
            yield
