"""When the policy is evaluated while it trains, and when the results end training early."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class EvaluationSchedule:
    """Knows which evaluations are due; a due one stays so, over restarts, until it has a result."""

    def __init__(
        self, settings: TrainerSettings, records: RunRecords, checkpointer: Checkpointer
    ) -> None:
        self._settings = settings
        self._records = records
        self._checkpointer = checkpointer
        self._state = checkpointer.state

    def is_due(self, every: int, *, since: int) -> bool:
        """Whether the step taken since that one is one of every so many, and not the last."""
        step = self._state.num_train_steps
        is_new = since < step < self._settings.num_steps
        return bool(is_new and every and step % every == 0)

    def schedule_evaluation(self, *, since: int) -> int | None:
        """Return the step taken since that one, if tasks are to be evaluated on after it."""
        is_due = self.is_due(self._settings.evaluation.every, since=since)
        if not (is_due and self._settings.evaluation.num_tasks):
            return None
        self._state.due_evaluations.append(self._state.num_train_steps)
        return self._state.num_train_steps

    def mark_evaluated(self, due: int, *, judged: float | None, is_redone: bool = False) -> None:
        """The evaluation that was due after a train step has come out so, or to nothing (None)."""
        if due in self._state.due_evaluations:
            self._state.due_evaluations.remove(due)
        if judged is not None:
            self.observe(judged)
        if not is_redone:
            self._checkpointer.note(evaluated=due, judged=judged)

    def mark_recorded(self) -> None:
        """Mark those evaluated that a kill left with a row of metrics, and with nothing else."""
        for due in tuple(self._state.due_evaluations):
            row = self._records.evaluation_due_after(due)
            if row is not None:
                judged = row["mean_reward"] if row["num_trajectories"] else None
                self.mark_evaluated(due, judged=judged)

    def observe(self, value: float) -> None:
        """Stop early where `stop_at` is reached or `stop_without_gain` results were no better.

        Higher is better. What was seen is kept in the job's state, so a restart knows it.
        """
        state = self._state
        best = state.best_evaluation
        if best is None or value > best:
            state.best_evaluation, state.num_evaluations_without_gain = value, 0
        else:
            state.num_evaluations_without_gain += 1
        reason = self._reason_to_stop(value)
        if reason and not state.stopped_early:
            state.stopped_early = reason
            log.info("Stopping early.", extra={"reason": reason})

    def _reason_to_stop(self, value: float) -> str:
        limits, waited = self._settings.evaluation, self._state.num_evaluations_without_gain
        if limits.stop_at is not None and value >= limits.stop_at:
            return f"held-out evaluation reached {value:.4g}"
        if limits.stop_without_gain and waited >= limits.stop_without_gain:
            return f"{waited} held-out evaluations in a row were no better"
        return ""
