"""Supervised steps: the warm start before RL, and the mode SFT."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from dialoop_services.trainer.data.demonstrations import DemonstrationSet, num_tokens_to_train
from dialoop_services.trainer.job.train_steps import row_of_oversize

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dialoop.sequences import Sequence
    from dialoop_learning.training import UpdateReport

    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.learner.learner import Kind
    from dialoop_services.trainer.settings import TrainerSettings

_RECORD_EVERY = 10


class WarmStart:
    """SFT steps before RL. Checkpoints between them let a killed trainer continue."""

    def __init__(
        self, settings: TrainerSettings, parts: JobParts, checkpointer: Checkpointer
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._checkpointer = checkpointer
        self._state = checkpointer.state

    async def run(self) -> None:
        """Take the steps that are left, or as many as fit before the job stops."""
        state, board = self._state, self._parts.board
        last, demonstrations = self._settings.warm_start.num_steps, self._parts.demonstrations
        if demonstrations is None or state.num_warm_start_steps >= last:
            return
        num_drawn = state.num_warm_start_steps + state.num_refused_updates
        await asyncio.to_thread(demonstrations.skip, num_drawn)
        while state.num_warm_start_steps < last:
            await board.wait_while_paused()
            if board.is_stopping:
                return
            await self._step(next(demonstrations))
            done = state.num_warm_start_steps
            if done < last and not done % self._settings.warm_start.checkpoint_every:
                await self._checkpointer.begin()

    async def _step(self, batch: list[Sequence]) -> None:
        state = self._state
        learner = self._parts.learner
        report = await asyncio.to_thread(
            lambda: learner.warm_start_step(learner.rows_to_imitate(batch))
        )
        count_update(self._parts, report, "warm_start")
        if not report.step.applied:
            return
        state.num_warm_start_steps += 1
        if state.num_warm_start_steps % _RECORD_EVERY == 0:
            self._parts.records.metric(
                "warm_start",
                train_step=state.num_warm_start_steps,
                policy_version=None,
                loss=report.loss,
                learning_rate=report.step.learning_rate,
            )


class SupervisedSteps:
    """SFT's train steps: one update each, on demonstrations in a new order every epoch."""

    def __init__(
        self,
        settings: TrainerSettings,
        parts: JobParts,
        demonstrations: DemonstrationSet,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._state = parts.board.state
        self._demonstrations = demonstrations

    async def next_step(self) -> Callable[[], Awaitable[None]] | None:
        """Return the next step; None when the job stops."""
        return None if self._parts.board.is_stopping else partial(self._train_step)

    async def heldout_loss(self) -> float | None:
        """Return and record the mean loss in nats of a held-out token; None without such rows."""
        heldout = self._demonstrations.heldout
        if not heldout:
            return None
        state = self._state
        earlier = state.heldout_losses.get(str(state.num_train_steps))
        if earlier is not None:
            return earlier
        learner = self._parts.learner
        loss, num_tokens = await asyncio.to_thread(
            lambda: learner.heldout_loss(learner.rows_to_imitate(heldout))
        )
        self._parts.records.metric(
            "heldout",
            train_step=state.num_train_steps,
            policy_version=state.policy_version,
            loss=loss,
            num_tokens=num_tokens,
        )
        state.heldout_losses[str(state.num_train_steps)] = loss
        return loss

    async def _train_step(self) -> None:
        state = self._state
        learner = self._parts.learner
        started, step = time.perf_counter(), state.num_train_steps
        # A batch whose update is refused is passed over.
        number = step + state.num_refused_updates
        batch = await asyncio.to_thread(self._demonstrations.batch, number)
        report = await asyncio.to_thread(lambda: learner.sft_step(learner.rows_to_imitate(batch)))
        num_tokens = sum(num_tokens_to_train(sequence, self._settings) for sequence in batch)
        is_applied = report.step.applied
        if is_applied:
            state.num_train_steps += 1
            state.num_trained_tokens += num_tokens
        self._parts.records.metric(
            "train" if is_applied else "refused",
            train_step=state.num_train_steps,
            policy_version=state.policy_version,
            epoch=self._demonstrations.epoch_of(number),
            num_trained_tokens=num_tokens,
            loss=report.loss,
            grad_norm=report.step.grad_norm,
            learning_rate=report.step.learning_rate,
            num_updates=int(is_applied),
            num_refused=int(not is_applied),
            train_s=time.perf_counter() - started,
            **row_of_oversize(batch, self._settings),
        )
        count_update(self._parts, report, "sft")


def count_update(parts: JobParts, report: UpdateReport, kind: Kind) -> None:
    """Count an update; raise InvalidConfig (UPDATES_REFUSED) after many in a row were refused."""
    is_applied, grad_norm = report.step.applied, report.step.grad_norm
    found = "" if is_applied else parts.learner.found_in(report.loss, grad_norm, kind)
    parts.board.count_updates(
        num_applied=int(is_applied), num_refused=int(not is_applied), found=found
    )
