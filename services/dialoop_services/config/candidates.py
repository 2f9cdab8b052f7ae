"""Define the table [train.candidates]: which groups a train step may train."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dialoop_services.config.values import Section


class CandidateSettings(Section):
    """Which groups may make up a train step; the others are replaced by newly played ones."""

    success_rate_above: float | None = Field(default=None, ge=0, lt=1)
    """Share of successes that a group must exceed to be trained; absent: no lower bound."""
    success_rate_below: float | None = Field(default=None, gt=0, le=1)
    """Share of successes below which a group must stay to be trained; absent: no upper bound."""
    success_reward: float = 1.0
    """Smallest reward of a trajectory that counts as a success, for the two bounds."""
    oversampling: float = Field(default=1.0, ge=1)
    """Number of groups in work for each group that is needed. With 2, twice as many are played
    ahead, so that a train step need not wait for what replaces groups without a signal."""
    max_empty_batches: int = Field(default=3, ge=1)
    """Number of empty batches in a row at which an alarm is raised. A batch is
    empty if none of as many groups in a row can be trained."""
    stop_after_empty: int = Field(default=100, ge=0)
    """Number of empty batches in a row at which training ends; 0: never. A resumed job counts
    anew."""

    @model_validator(mode="after")
    def _require_room_between(self) -> Self:
        low, high = self.success_rate_above, self.success_rate_below
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"success_rate_above is {low:g} and success_rate_below {high:g}, so no group could "
                "be trained: set success_rate_above below success_rate_below"
            )
        return self
