"""The job: warm start, publish, evaluate, train, publish, ..., evaluate.

    warm start -> publish -> evaluate -+-> lease a batch -> train step -> publish -+-> evaluate
                                       |                                           |
                                       +<------ checkpoint, then acknowledge <-----+

With `pipeline_depth` above 0 a publish runs beside the lease and the train step that follow. A
checkpoint, an evaluation and the next publish wait for its end. With 0 all take turns: a train step
waits for the end of an evaluation, too. A checkpoint holds up a train step until the state has been
copied. It is written, and its groups acknowledged, beside the steps that follow.

The queue leases tasks as soon as the first publish announced a policy, so collectors already play
while the first evaluation runs. SFT takes its batches from demonstrations instead, and publishes
when it evaluates and at its end.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.clients.trainer import Phase
from dialoop.errors import DialoopError
from dialoop.waits import waiting_for

from dialoop_services.trainer.job.checkpointer import Checkpointer
from dialoop_services.trainer.job.evaluation import EvaluationPlan, EvaluationResult
from dialoop_services.trainer.job.evaluation_schedule import EvaluationSchedule
from dialoop_services.trainer.job.policy_versions import VersionedPublisher
from dialoop_services.trainer.job.supervised import SupervisedSteps, WarmStart
from dialoop_services.trainer.job.train_steps import TrainSteps
from dialoop_services.trainer.publish.publisher import PolicyNotKept
from dialoop_services.trainer.recovery.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from pathlib import Path

    from dialoop_services.trainer.data.demonstrations import DemonstrationSet
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.publish.publisher import Published
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

DISK_LOW = "DISK_LOW"
"""The alarm that training waits for room on the disk of the run's folder."""
_DISK_POLL_S = 2.0
_MB = 1 << 20

T = TypeVar("T")


class TrainingJob:
    """Runs the phases in order. There is one per process, and one task runs it."""

    def __init__(
        self,
        settings: TrainerSettings,
        parts: JobParts,
        demonstrations: DemonstrationSet | None = None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._board = parts.board
        self.state = parts.board.state
        self.checkpointer = Checkpointer(settings, parts)
        self.versions = VersionedPublisher(settings, parts, self.checkpointer)
        self.schedule = EvaluationSchedule(settings, parts.records, self.checkpointer)
        # Held by a train step, and by callers that need the weights to stay as they are.
        self._between_steps = asyncio.Lock()
        self._warm_start = WarmStart(settings, parts, self.checkpointer)
        self._supervised: SupervisedSteps | None = None
        steps = TrainSteps(settings, parts, self.checkpointer, self.versions)
        self._recovery = Recovery(
            settings, parts, self.checkpointer, self.versions, self.schedule, steps
        )
        self._steps: TrainSteps | SupervisedSteps = steps
        if demonstrations is not None:
            supervised = SupervisedSteps(settings, parts, demonstrations)
            self._steps = self._supervised = supervised
        self._requests: set[asyncio.Task[Any]] = set()
        self.broken: Future[None] = Future()
        """Gets the unforeseen error of a request, after which the process should end."""

    async def run(self) -> None:
        """Run to the end and write trainer.json, or to the next step once the job is stopped."""
        try:
            await self._run()
        finally:
            await self.versions.close()
            await self.checkpointer.close()

    async def _run(self) -> None:
        phases = (self._begin, self._evaluate_before, self._train, self._evaluate_after)
        for phase in phases:
            await phase()
            if self._board.is_stopping:
                async with self._between_steps:
                    await self.checkpointer.shutdown()
                return
        learner = self._parts.learner
        facts = {
            "num_parameters": learner.num_parameters,
            "matrix_products": learner.matrix_products,
            "num_steps": self._settings.num_steps,
            "alarms": sorted(self._board.alarms),
        }
        self._parts.records.write_result({**self.state.result(), **facts})
        self._board.phase = Phase.DONE

    async def publish(self) -> Published:
        """Publish the current weights as a new version, between train steps."""
        return await self._to_the_end(partial(self.versions.publish_next, is_requested=True))

    async def checkpoint(self) -> Path:
        """Save everything between train steps, then acknowledge what the checkpoint contains."""
        return await self._to_the_end(self.checkpointer.checkpoint)

    async def _to_the_end(self, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Act between train steps, to the end even if the caller is cancelled."""

        async def act_alone() -> T:
            async with self._between_steps:
                try:
                    return await act()
                except Exception as error:
                    # Other refusals have changed nothing; a policy that is not kept is live.
                    is_refused = isinstance(error, DialoopError)
                    is_broken = not is_refused or isinstance(error, PolicyNotKept)
                    if is_broken and not self.broken.done():
                        self.broken.set_exception(error)
                    raise

        acting = asyncio.create_task(act_alone())
        self._requests.add(acting)
        acting.add_done_callback(self._requests.discard)
        return await asyncio.shield(acting)

    async def evaluate(self, plan: EvaluationPlan, *, due: int | None = None) -> EvaluationResult:
        """Evaluate the live policy and record the result under the plan's label.

        `due` is the train step after which the schedule asked for it, if it did.
        """
        live = self._board.newest
        async with self._parts.placement.engines_awake(self._between_steps):
            step = self.state.num_train_steps
            if live is not None:
                self._parts.publisher.keep(live.policy_version)
            result = await self._parts.evaluator.evaluate(plan, train_step=step)
        least = self._settings.evaluation.min_share
        judged = result.judged(least)
        if result.newest is not None:
            # Of greedy answers, or of other tasks, a mean is not to be compared with the others'.
            sampled = EvaluationPlan.full(self._settings, plan.label, temperature=1.0)
            is_comparable = plan in (sampled, EvaluationPlan.running(self._settings))
            self._parts.publisher.keep(result.newest, judged if is_comparable else None)
        row = result.row() | ({} if due is None else {"due_train_step": due})
        if judged is None:
            log.warning(
                "An evaluation decides nothing: too few of its episodes count.",
                extra={"label": plan.label, "share": result.share, "min_share": least},
            )
        self._parts.records.metric(
            "evaluation",
            train_step=step,
            policy_version=result.newest,
            label=plan.label,
            **row,
        )
        return result

    async def _begin(self) -> None:
        """Restore, or warm start and publish the first policy."""
        async with self._between_steps:
            if await self.checkpointer.restore():
                with self._phase(Phase.EVALUATING, "publish_restored"):
                    await self._recovery.run()
                self.schedule.mark_recorded()
                self.schedule.decide_again()
            with self._phase(Phase.WARM_START, "warm_start"):
                await self._warm_start.run()
            if not (self.state.num_policy_versions or self._board.is_stopping):
                with self._phase(Phase.EVALUATING, "publish_first"):
                    await self.versions.publish_first()
        if not self._board.is_stopping:
            await self._unless_stopped(self._parts.evaluator.drop_held())

    async def _train(self) -> None:
        with self._phase(Phase.TRAINING, "train"):
            async with self.checkpointer.held.keep(), asyncio.TaskGroup() as background:
                await self._begin_evaluating(background, *self.state.due_evaluations)
                if self._has_steps_left():  # a job that had ended may have got more
                    evaluations = self.state.evaluations.items()
                    self.state.evaluations = {
                        k: v for k, v in evaluations if not k.startswith("after_")
                    }
                while self._has_steps_left():
                    await self._board.wait_while_paused()
                    await self._wait_for_disk()
                    step = await self._steps.next_step()
                    # The job may have been paused meanwhile: then keep the leases and wait.
                    await self._board.wait_while_paused()
                    if step is not None and not self._board.is_stopping:
                        await self._take(step, background)
            if self._board.is_stopping:
                return
            if self._supervised is not None:
                async with self._between_steps:
                    await self._supervised.heldout_loss()
                    await self.versions.publish_next()
            await self.checkpoint()

    async def _wait_for_disk(self) -> None:
        """Return at once, or when the disk has room for what the next step may write, or at a stop.

        A full disk would refuse publishes and checkpoints, and other programs' writes too.
        """
        with waiting_for("disk", "room for the next step"):
            while not self._board.is_stopping:
                num_missing = await asyncio.to_thread(self._missing_disk_bytes)
                if num_missing <= 0:
                    break
                if DISK_LOW not in self._board.alarms:
                    log.error(
                        "Training waits for room on the disk of the run's folder.",
                        extra={"missing_mb": -(-num_missing // _MB)},
                    )
                self._board.raise_alarm(DISK_LOW, on=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._board.wait_until_stopping(), _DISK_POLL_S)
        self._board.raise_alarm(DISK_LOW, on=False)

    def _missing_disk_bytes(self) -> int:
        """Return how many bytes have to be freed before the next step; 0 or less for none."""
        least = self._settings.min_free_disk_mb * _MB
        if not least:
            return 0
        num_next = self._parts.checkpoints.num_unsaved_bytes
        return least + num_next - shutil.disk_usage(self._settings.run_dir).free

    def _has_steps_left(self) -> bool:
        is_left = self.state.num_train_steps < self._settings.num_steps
        return is_left and not (self._board.is_stopping or self.state.stopped_early)

    async def _take(
        self, step: Callable[[], Awaitable[None]], background: asyncio.TaskGroup
    ) -> None:
        """Take one step, and do what is due after it."""
        since = self.state.num_train_steps
        async with self._between_steps:
            await step()
            to_evaluate = self.schedule.is_due(self._settings.evaluation.every, since=since)
            if to_evaluate and self._supervised is not None:
                await self._evaluate_supervised(self._supervised)
            due = self.schedule.schedule_evaluation(since=since)
            if due is not None:
                await self.versions.wait_for_publish()  # it evaluates this step's policy
            # Last, because SFT has no journal: its checkpoint must hold the evaluation's result.
            if self.schedule.is_due(self._settings.checkpoint_every, since=since):
                await self.checkpointer.begin()
                background.create_task(self.checkpointer.wait_until_saved())
        if due is not None:
            await self._begin_evaluating(background, due)

    async def _begin_evaluating(self, background: asyncio.TaskGroup, *due: int) -> None:
        """Start the due evaluations, also those that a killed trainer did not end."""
        evaluating = background.create_task(self._evaluate_all(due))
        takes_turns = self._settings.mode == "rl" and not self._settings.first_depth
        if takes_turns or self._parts.placement.is_shared:
            await evaluating  # nothing is trained or published meanwhile

    async def _evaluate_all(self, due: tuple[int, ...]) -> None:
        for train_step in due:
            await self._evaluate_while_training(train_step)

    async def _evaluate_supervised(self, supervised: SupervisedSteps) -> None:
        """Compute the loss of held-out demonstrations, and publish if tasks are to be evaluated."""
        loss = await supervised.heldout_loss()
        if self._settings.evaluation.num_tasks:
            await self.versions.publish_next()
        elif loss is not None:
            self.schedule.observe(-loss)

    async def _evaluate_while_training(self, due: int) -> None:
        """Run the evaluation due after that train step; if it fails, training continues."""
        plan, judged = EvaluationPlan.running(self._settings), None
        try:
            result = await self._unless_stopped(self.evaluate(plan, due=due))
        except DialoopError as error:
            log.warning("A running evaluation failed.", extra={"reason": error.reason})
        else:
            if result is None:  # it stays due, and the next process runs it
                return
            judged = result.judged(self._settings.evaluation.min_share)
        async with self._between_steps:
            self.schedule.mark_evaluated(due, judged=judged)
            if self._supervised is not None and judged is not None:
                # SFT has no journal, and the step's checkpoint is older than this result.
                await self.checkpointer.begin()

    async def _evaluate_before(self) -> None:
        """Evaluate the first policy, and save the result before the first train step.

        A restarted job whose weights contain train steps does not evaluate "before".
        """
        if self.state.num_train_steps:
            return
        num_before = len(self.state.evaluations)
        with self._phase(Phase.EVALUATING, "evaluate_before"):
            await self._unless_stopped(self._evaluate_both("before"))
            is_new = len(self.state.evaluations) > num_before
            if is_new and not self._board.is_stopping:  # a job that stops saves anyway
                await self.checkpoint()

    async def _evaluate_after(self) -> None:
        with self._phase(Phase.EVALUATING, "evaluate_after"):
            await self._unless_stopped(self._evaluate_both("after"))

    async def _evaluate_both(self, when: str) -> None:
        """Evaluate greedily and by sampling on the held-out split, once per run."""
        evaluations = self.state.evaluations
        for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            label = f"{when}_{how}"
            if self._settings.evaluation.num_tasks and label not in evaluations:
                result = await self.evaluate(
                    EvaluationPlan.full(self._settings, label, temperature=temperature)
                )
                evaluations[label] = result.row()

    @contextmanager
    def _phase(self, phase: Phase, name: str) -> Iterator[None]:
        """Show the phase and count its seconds."""
        self._board.phase = phase
        with self.checkpointer.timer.phase(name):
            yield

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or cancel it and return None when the job stops first."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._board.wait_until_stopping())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
        return None if working.cancelled() else working.result()
