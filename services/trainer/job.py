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
from typing import TYPE_CHECKING

from dialoop.clients.trainer import Phase
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Group, SamplingParams, Stage

from services.trainer.batches import Batch, sort_batch
from services.trainer.checkpoint import Progress, lineage_after_restore, published_version
from services.trainer.evaluation import Evaluation, EvaluationPlan

if TYPE_CHECKING:
    from collections.abc import Iterator
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
        # Held by a train step and by whoever wants the weights to stand still between two.
        self._between_steps = asyncio.Lock()

    async def run(self) -> None:
        """Run to the end and write trainer.json."""
        await self._restore()
        with self._phase(Phase.WARM_START, "warm_start"):
            await self._warm_start()
        if not self._progress.num_policy_versions:
            with self._phase(Phase.EVALUATING, "publish_first"):
                await self._publish_next()
                await self.checkpoint()
        with self._phase(Phase.EVALUATING, "evaluate_before"):
            await self._evaluate_both("before")
        with self._phase(Phase.TRAINING, "train"):
            await self._train()
        with self._phase(Phase.EVALUATING, "evaluate_after"):
            await self._evaluate_both("after")
        self._write_result()
        self._board.phase = Phase.DONE

    async def publish(self) -> Published:
        """Publish the present weights as a new version, between train steps."""
        async with self._between_steps:
            return await self._publish_next()

    async def checkpoint(self) -> Path:
        """Save everything between train steps, then acknowledge what the checkpoint contains."""
        async with self._between_steps:
            return await self._checkpoint()

    async def _checkpoint(self) -> Path:
        self._progress.cursor = (await self._replay.get_stats(self._settings.run)).cursor
        path = await asyncio.to_thread(self._checkpoints.save, self._learner, self._progress)
        await self._replay.acknowledge(self._settings.run, self._unsaved_leases)
        self._unsaved_leases.clear()
        # What was acknowledged cannot come back; the list starts anew after the next checkpoint.
        self._progress.consumed_group_ids.clear()
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

    async def _restore(self) -> None:
        restored = await asyncio.to_thread(self._checkpoints.restore, self._learner)
        if restored is None:
            return
        live = published_version(self._settings.run_dir)
        version = lineage_after_restore(restored.policy_version, live)
        self._progress = restored
        self._progress.policy_version = version
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
        async with asyncio.TaskGroup() as background:
            while self._progress.num_train_steps < self._settings.num_train_steps:
                await self._board.wait_while_paused()
                started = time.perf_counter()
                batch = await self._lease_batch()
                async with self._between_steps:
                    await self._train_step(batch, time.perf_counter() - started)
                step = self._progress.num_train_steps
                if step % self._settings.checkpoint_every == 0:
                    await self.checkpoint()
                every = self._settings.evaluate_every
                if every and step % every == 0 and step < self._settings.num_train_steps:
                    background.create_task(self.evaluate(self._plan("running", 1.0)))
        await self.checkpoint()

    async def _train_step(self, batch: Batch, lease_s: float) -> None:
        version = self._progress.policy_version
        self._progress.num_train_steps += 1
        self._board.num_train_steps = self._progress.num_train_steps
        if batch.train:
            await self._update(batch, version, lease_s)
        # After the publish: a refunded credit starts a group, which is to be of the new policy.
        for reason, leases in batch.dropped.items():
            await self._drop(leases, reason)

    async def _update(self, batch: Batch, version: PolicyVersion, lease_s: float) -> None:
        temperature = batch.groups[0].trajectories[0].sampling.temperature or 1.0
        started = time.perf_counter()
        report = await asyncio.to_thread(
            self._learner.train_step, batch.sequences, temperature=temperature
        )
        train_s = time.perf_counter() - started
        self._count(batch, report, version)
        published = await self._publish_next([lease.lease_id for lease in batch.train])
        self._record_step(batch, report, published, lease_s=lease_s, train_s=train_s)

    async def _lease_batch(self) -> Batch:
        """Wait for a whole batch; groups that a checkpoint already holds are acknowledged."""
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
            if self._unsaved_leases:
                await self._replay.extend(
                    self._settings.run, self._unsaved_leases, lease_s=self._settings.lease_s
                )
            batch = sort_batch(
                leased.leases,
                current=self._progress.policy_version,
                max_staleness=self._settings.max_staleness,
                consumed_group_ids=set(self._progress.consumed_group_ids),
            )
            if batch.already_consumed:
                ids = [lease.lease_id for lease in batch.already_consumed]
                await self._replay.acknowledge(self._settings.run, ids)
            if batch.train or batch.dropped:
                return batch

    async def _drop(self, leases: tuple[GroupLease, ...], reason: str) -> None:
        await self._replay.drop(self._settings.run, [lease.lease_id for lease in leases], reason)
        self._record_groups([lease.group for lease in leases], reason)

    async def _publish_next(self, trained_lease_ids: list[str] | None = None) -> Published:
        version = self._progress.policy_version
        version = replace(version, number=version.number + 1)
        self._unsaved_leases.extend(trained_lease_ids or [])
        published = await self._publisher.publish(
            version, trained_lease_ids=trained_lease_ids or []
        )
        self._progress.policy_version = version
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

    def _record_groups(self, groups: list[Group], outcome: str) -> None:
        self._records.trajectories(
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
        **seconds: float,
    ) -> None:
        self._record_groups(list(batch.groups), "trained")
        dropped = [lease.group for leases in batch.dropped.values() for lease in leases]
        trajectories = [t for g in (*batch.groups, *dropped) for t in g.trajectories]
        version = published.policy_version
        before = replace(version, number=version.number - 1)
        staleness = list(batch.staleness(before).elements())
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

    def _plan(self, label: str, temperature: float) -> EvaluationPlan:
        running = label == "running"
        settings = self._settings
        return EvaluationPlan(
            environment=settings.environment,
            split=settings.heldout_split,
            num_tasks=(
                min(settings.num_running_evaluation_tasks, settings.num_evaluation_tasks)
                if running
                else settings.num_evaluation_tasks
            ),
            sampling=SamplingParams(
                temperature=temperature, max_new_tokens=settings.max_new_tokens
            ),
            label=label,
        )

    async def _evaluate_both(self, when: str) -> None:
        """Greedy and sampled accuracy on the held-out split, once per run."""
        for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            label = f"{when}_{how}"
            if self._settings.num_evaluation_tasks and label not in self._progress.evaluations:
                result = await self.evaluate(self._plan(label, temperature))
                self._progress.evaluations[label] = {
                    "mean_reward": result.mean_reward,
                    "tool_call_rate": result.tool_call_rate,
                    "num_trajectories": result.num_trajectories,
                    "num_failed": result.num_failed,
                }

    @contextmanager
    def _phase(self, phase: Phase, name: str) -> Iterator[None]:
        self._board.phase = phase
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        seconds = self._progress.phase_seconds.setdefault(name, {"wall_s": 0.0, "cpu_s": 0.0})
        seconds["wall_s"] += time.perf_counter() - wall
        seconds["cpu_s"] += time.process_time() - cpu

    def _write_result(self) -> None:
        progress = self._progress
        steps = max(1, progress.num_train_steps)
        self._records.write_result(
            {
                "phases": progress.phase_seconds,
                "num_train_steps": progress.num_train_steps,
                "num_policy_versions": progress.num_policy_versions,
                "staleness_histogram": dict(sorted(progress.staleness_histogram.items())),
                "share_of_train_steps_with_older_data": progress.num_steps_with_older_data / steps,
                "max_logprob_difference": progress.max_logprob_difference,
                "num_trained_tokens": progress.num_trained_tokens,
                "num_trajectories_trained": progress.num_trained_trajectories,
                "forks": dict(progress.forks),
                "evaluations": progress.evaluations,
                "num_parameters": self._learner.num_parameters,
            }
        )
