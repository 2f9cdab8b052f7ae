"""Early stop: training ends when held-out evaluation has got where it should, or goes nowhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from dialoop_services.trainer.recovery.checkpoint import Progress
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """When to stop; what was seen is kept in the progress, so a restart does not forget it.

    `value`: stop once an evaluation reaches it. `num_without_gain`: stop once so many in a row have
    not been better than the best; 0 for never.
    """

    value: float | None = None
    num_without_gain: int = 0

    @classmethod
    def of(cls, settings: TrainerSettings) -> Self:
        """As the settings say."""
        return cls(
            value=settings.evaluation.stop_at,
            num_without_gain=settings.evaluation.stop_without_gain,
        )

    def observe(self, value: float, progress: Progress) -> None:
        """Take in an evaluation; higher is better."""
        best = progress.best_evaluation
        if best is None or value > best:
            progress.best_evaluation, progress.num_evaluations_without_gain = value, 0
        else:
            progress.num_evaluations_without_gain += 1
        reason = self._reason(value, progress)
        if reason and not progress.stopped_early:
            progress.stopped_early = reason
            log.info("Stopping early.", extra={"reason": reason})

    def _reason(self, value: float, progress: Progress) -> str:
        if self.value is not None and value >= self.value:
            return f"held-out evaluation reached {value:.4g}"
        waited = progress.num_evaluations_without_gain
        if self.num_without_gain and waited >= self.num_without_gain:
            return f"{waited} held-out evaluations in a row were no better"
        return ""
