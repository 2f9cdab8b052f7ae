"""Runs that need a policy, for environments in this process: there is no policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop_extras.text_environment.environment import TextRun
    from dialoop_extras.trials.trial import TrialOptions, TrialResult

    from dialoop.trajectory import SamplingParams


def no_inference(remedy: str) -> PreconditionFailed:
    """Return the error of a run that needs a policy: there is none in this process."""
    return PreconditionFailed(
        "Environments in this process have no inference service.",
        reason=Reason.NO_INFERENCE,
        remedy=remedy,
    )


class LocalRuns:
    """EnvironmentClient's methods that ask the service's own policy; always NO_INFERENCE."""

    async def run_text(
        self,
        environment: str,
        queries: Iterable[str],
        *,
        extra: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        compat: str = "",
    ) -> TextRun:
        """Raise PreconditionFailed (NO_INFERENCE): this needs a service."""
        raise no_inference("Run a TextEnvironment with a policy of yours.")

    async def run_trial(
        self,
        environment: str,
        inputs: Iterable[Mapping[str, str]],
        *,
        options: TrialOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> TrialResult:
        """Raise PreconditionFailed (NO_INFERENCE): this needs a service."""
        raise no_inference("Call dialoop_extras.trials.run_trial with an agent of yours.")
