"""When the policy is evaluated while it trains, and when the results end training early."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dialoop_services.trainer.job.evaluation import judged_in

if TYPE_CHECKING:
    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class EvaluationSchedule:
    """The evaluations that are due. A due one stays due, over restarts, until it has a result."""

    def __init__(
        self, settings: TrainerSettings, records: RunRecords, checkpointer: Checkpointer
    ) -> None:
        self._settings = settings
        self._records = records
        self._checkpointer = checkpointer
        self._state = checkpointer.state

    def is_due(self, every: int, *, since: int) -> bool:
        """Return whether the newest step is past `since`, a multiple of `every`, not the last."""
        step = self._state.num_train_steps
        is_new = since < step < self._settings.num_steps
        return bool(is_new and every and step % every == 0)

    def schedule_evaluation(self, *, since: int) -> int | None:
        """Return the step after `since` as due, if an evaluation on tasks follows it; else None."""
        is_due = self.is_due(self._settings.evaluation.every, since=since)
        if not (is_due and self._settings.evaluation.num_tasks):
            return None
        self._state.due_evaluations.append(self._state.num_train_steps)
        return self._state.num_train_steps

    def mark_evaluated(self, due: int, *, judged: float | None, is_recovered: bool = False) -> None:
        """Mark the evaluation due after a train step as done, with its result (None: it failed)."""
        if due in self._state.due_evaluations:
            self._state.due_evaluations.remove(due)
        if judged is not None:
            self.observe(judged)
        if not is_recovered:
            self._checkpointer.record(evaluated=due, judged=judged)

    def mark_recorded(self) -> None:
        """Mark evaluations as done that have a row in metrics.jsonl but were not saved."""
        for due in tuple(self._state.due_evaluations):
            row = self._records.evaluation_due_after(due)
            if row is not None:
                least = self._settings.evaluation.min_share
                self.mark_evaluated(due, judged=judged_in(row, least))

    def observe(self, value: float) -> None:
        """Stop early at `stop_at`, or when the last `stop_without_gain` results were no better.

        Higher is better. The job's state keeps the results, so a restart knows them.
        """
        state = self._state
        best = state.best_evaluation
        if best is None or value > best:
            state.best_evaluation, state.num_evaluations_without_gain = value, 0
        else:
            state.num_evaluations_without_gain += 1
        self._stop_at(value)

    def decide_again(self) -> None:
        """Stop a resumed job early if, by its settings, the results in its state ask for it."""
        if self._state.best_evaluation is not None:
            self._stop_at(self._state.best_evaluation)

    def _stop_at(self, value: float) -> None:
        reason = self._reason_to_stop(value)
        if reason and not self._state.stopped_early:
            self._state.stopped_early = reason
            log.info("Stopping early.", extra={"reason": reason})

    def _reason_to_stop(self, value: float) -> str:
        limits = self._settings.evaluation
        num_without_gain = self._state.num_evaluations_without_gain
        if limits.stop_at is not None and value >= limits.stop_at:
            return f"held-out evaluation reached {value:.4g}"
        if limits.stop_without_gain and num_without_gain >= limits.stop_without_gain:
            return f"{num_without_gain} held-out evaluations in a row were no better"
        return ""
