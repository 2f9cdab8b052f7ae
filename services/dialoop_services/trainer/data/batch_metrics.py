"""What a train step's trajectories look like, as numbers of its metrics row.

`docs/metrics.md` says what each name means, and a test holds the two together.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.trajectory import StopReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.trajectory import Trajectory

_CUT_OFF = (StopReason.LENGTH, StopReason.CONTEXT_FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFigures:
    """What the metrics need of a trajectory: without its tokens, which may be dropped."""

    reward: float
    rewards: Mapping[str, float]
    num_tokens: int
    calls_tools: bool
    is_truncated: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryFigures:
        """Return the figures of a trajectory; its rewards are sums over turns, by name."""
        sums: dict[str, float] = {}
        for turn in trajectory.turns:
            for reward in turn.rewards:
                sums[reward.name] = sums.get(reward.name, 0.0) + reward.value * reward.weight
        is_cut_off = any(turn.stop_reason in _CUT_OFF for turn in trajectory.turns)
        return cls(
            reward=trajectory.reward,
            rewards=sums,
            num_tokens=trajectory.num_model_tokens,
            calls_tools=trajectory.num_tool_calls > 0,
            is_truncated=trajectory.truncated or is_cut_off,
        )


def metrics_of(trajectories: Sequence[TrajectoryFigures]) -> dict[str, float]:
    """Return rewards, by name too, lengths and shares over all trajectories of a train step.

    Without a trajectory only `reward` and `tool_call_rate` are there, and 0.
    """
    if not trajectories:
        return {"reward": 0.0, "tool_call_rate": 0.0}
    rewards = [t.reward for t in trajectories]
    lengths = [t.num_tokens for t in trajectories]
    metrics = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "tool_call_rate": sum(t.calls_tools for t in trajectories) / len(trajectories),
        "truncated_share": sum(t.is_truncated for t in trajectories) / len(trajectories),
        "response_tokens_mean": statistics.fmean(lengths),
        "response_tokens_min": min(lengths),
        "response_tokens_max": max(lengths),
    }
    for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
        # A trajectory without a reward of that name, as one that ended early, has 0 of it.
        values = [t.rewards.get(name, 0.0) for t in trajectories]
        metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
        metrics[f"rewards/{name}/std"] = statistics.pstdev(values)
    return metrics
