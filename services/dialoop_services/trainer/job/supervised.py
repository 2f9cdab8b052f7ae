"""Supervised steps: the warm start before RL, and SFT as a mode of its own."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from dialoop_services.trainer.data.demonstration_files import num_tokens_to_train

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dialoop.sequences import Sequence

    from dialoop_services.trainer.data.demonstration_set import DemonstrationSet
    from dialoop_services.trainer.job.state import JobParts, Standing
    from dialoop_services.trainer.settings import TrainerSettings

_RECORD_EVERY = 10


class WarmStart:
    """SFT steps before RL; a checkpoint now and then, so that a kill does not start it anew."""

    def __init__(self, settings: TrainerSettings, parts: JobParts, standing: Standing) -> None:
        self._settings = settings
        self._parts = parts
        self._standing = standing

    async def run(self) -> None:
        """Take the steps that are left, or those until the job is stopped."""
        progress, board = self._standing.progress, self._parts.board
        last, demonstrations = self._settings.warm_start.num_steps, self._parts.demonstrations
        if demonstrations is None or progress.num_warm_start_steps >= last:
            return
        await asyncio.to_thread(demonstrations.skip, progress.num_warm_start_steps)
        while progress.num_warm_start_steps < last:
            await board.wait_while_paused()
            if board.is_stopping:
                return
            await self._step(next(demonstrations))
            done = progress.num_warm_start_steps
            if done < last and not done % self._settings.warm_start.checkpoint_every:
                await self._standing.checkpoint()

    async def _step(self, batch: list[Sequence]) -> None:
        progress = self._standing.progress
        report = await asyncio.to_thread(self._parts.learner.warm_start_step, batch)
        progress.num_warm_start_steps += 1
        self._parts.board.num_warm_start_steps = progress.num_warm_start_steps
        if progress.num_warm_start_steps % _RECORD_EVERY == 0:
            self._parts.records.metric(
                "warm_start",
                train_step=progress.num_warm_start_steps,
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
        standing: Standing,
        demonstrations: DemonstrationSet,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._standing = standing
        self._demonstrations = demonstrations

    async def next_step(self) -> Callable[[], Awaitable[None]] | None:
        """What is to be done next; None when the job stops."""
        return None if self._parts.board.is_stopping else partial(self._train_step)

    async def heldout_loss(self) -> float | None:
        """Mean loss of a held-out token, which is recorded; None without held-out rows."""
        rows = self._demonstrations.heldout
        if not rows:
            return None
        progress = self._standing.progress
        known = progress.heldout_losses.get(str(progress.num_train_steps))
        if known is not None:
            return known
        loss, num_tokens = await asyncio.to_thread(self._parts.learner.heldout_loss, rows)
        self._parts.records.metric(
            "heldout",
            train_step=progress.num_train_steps,
            policy_version=progress.policy_version,
            loss=loss,
            num_tokens=num_tokens,
        )
        progress.heldout_losses[str(progress.num_train_steps)] = loss
        return loss

    async def _train_step(self) -> None:
        progress = self._standing.progress
        started = time.perf_counter()
        step = progress.num_train_steps
        batch = await asyncio.to_thread(self._demonstrations.batch, step)
        report = await asyncio.to_thread(self._parts.learner.sft_step, batch)
        num_tokens = sum(num_tokens_to_train(sequence, self._settings) for sequence in batch)
        progress.num_train_steps += 1
        progress.num_trained_tokens += num_tokens
        self._parts.board.num_train_steps = progress.num_train_steps
        self._parts.records.metric(
            "train",
            train_step=progress.num_train_steps,
            policy_version=progress.policy_version,
            epoch=self._demonstrations.epoch_of(step),
            num_trained_tokens=num_tokens,
            loss=report.loss,
            grad_norm=report.step.grad_norm,
            learning_rate=report.step.learning_rate,
            num_updates=int(report.step.applied),
            num_refused=int(not report.step.applied),
            train_s=time.perf_counter() - started,
            **self._row_of_oversize(batch),
        )

    def _row_of_oversize(self, batch: list[Sequence]) -> dict[str, int]:
        """How many demonstrations were dropped or truncated, where that was asked for."""
        if self._settings.oversize == "error":
            return {}
        most = self._settings.packed_row_tokens
        return {"num_oversize": sum(len(sequence.token_ids) > most for sequence in batch)}
