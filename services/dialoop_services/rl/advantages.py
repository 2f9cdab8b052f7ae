"""Group advantages: how much better a trajectory did than the others of its task.

group_advantages([0.0, 1.0]).values        # (-0.7071, 0.7071): (reward - mean) / std
group_advantages([1.0, 1.0]).is_uniform    # True, values (0.0, 0.0): nothing to learn from
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dialoop.trajectory import Group, Trajectory

Aggregate = Literal["sum", "max", "mean"]

_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "mean": statistics.fmean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """The rule by which the rewards of a group become advantages.

    divide_by_std: divide by the group's standard deviation, as GRPO does (arXiv 2402.03300).
    Dr. GRPO (arXiv 2503.20783) does not.
    leave_one_out: subtract the mean of the other trajectories, as RLOO does (arXiv 2402.14740).
    eps: the smallest divisor. A group whose rewards differ by at most eps counts as uniform.
    aggregate: how the rewards of its turns make a trajectory's reward.
    """

    divide_by_std: bool = True
    leave_one_out: bool = False
    eps: float = 1e-6
    aggregate: Aggregate = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a group of n trajectories.

    values: n advantages, in the order of the rewards. mean, std: of the n rewards, std over n - 1.
    is_uniform: whether the rewards are all the same; the advantages are then exactly 0.
    """

    values: tuple[float, ...]
    mean: float
    std: float
    is_uniform: bool


def group_advantages(
    rewards: Sequence[float], settings: AdvantageSettings | None = None
) -> GroupAdvantages:
    """Return the advantages of n rewards: n values (r_i - baseline) / max(std, eps).

    The formula is GRPO's with outcome supervision (arXiv 2402.03300, section 4.1.2). The baseline
    is the mean of all rewards or, with `leave_one_out`, of the others (RLOO, arXiv 2402.14740).
    std is the standard deviation over n - 1. Without `divide_by_std` the divisor is 1 (Dr. GRPO,
    arXiv 2503.20783).

    TRL divides by std + 1e-4. TRL's RLOOTrainer leaves one out as here, but it normalises over all
    sequences of the batch. torchrl's way is `dialoop_services.rl.monte_carlo`.

    Raises InvalidInput (GROUP_TOO_SMALL) for fewer than 2 rewards, which have no baseline, and
    InvalidInput (NON_FINITE_REWARD) for a reward that is infinite or not a number.
    """
    settings = settings or AdvantageSettings()
    _require_rewards(rewards)
    mean = statistics.fmean(rewards)
    std = statistics.stdev(rewards)
    # A uniform group gets exactly 0: rounding in the mean must not become an advantage.
    is_uniform = max(rewards) - min(rewards) <= settings.eps
    scale = _scale(len(rewards), std, settings)
    values = tuple(0.0 if is_uniform else (reward - mean) * scale for reward in rewards)
    return GroupAdvantages(values=values, mean=mean, std=std, is_uniform=is_uniform)


def with_advantages(
    group: Group, settings: AdvantageSettings | None = None, *, group_size: int | None = None
) -> Group:
    """Return the group with `advantage` set: one number per trajectory, on all its sequences.

    The numbers are those of `group_advantages`. Raises PreconditionFailed (GROUP_INCOMPLETE) when
    the group does not hold `group_size` trajectories or one of them failed through no fault of the
    policy, because a partial group has a wrong baseline.
    """
    require_complete(group, group_size)
    settings = settings or AdvantageSettings()
    advantages = group_advantages(returns_of(group, settings.aggregate), settings)
    return with_values(group, advantages.values)


def with_values(group: Group, advantages: Sequence[float]) -> Group:
    """Return the group with the n advantages on the sequences of its n trajectories."""
    pairs = zip(group.trajectories, advantages, strict=True)
    return replace(group, trajectories=tuple(_with_advantage(t, value) for t, value in pairs))


def returns_of(group: Group, aggregate: Aggregate = "sum") -> list[float]:
    """Return one number for each trajectory: `return_of` the rewards of its turns.

    Raises InvalidInput (NON_FINITE_REWARD, GROUP_TOO_SMALL) as `group_advantages` does.
    """
    rewards = ([turn.reward for turn in t.turns] for t in group.trajectories)
    returns = [return_of(values, aggregate) for values in rewards]
    _require_rewards(returns)
    return returns


def return_of(rewards: Sequence[float], aggregate: Aggregate = "sum") -> float:
    """Return one number for the rewards of a trajectory's turns; 0 without rewards.

    return_of([0.0, 1.0], "mean")    # 0.5
    """
    return float(_AGGREGATES[aggregate](rewards)) if rewards else 0.0


def _scale(size: int, std: float, settings: AdvantageSettings) -> float:
    """Return the factor of (reward - mean): r - mean(others) equals (r - mean) * n / (n - 1)."""
    scale = size / (size - 1) if settings.leave_one_out else 1.0
    return scale / max(std, settings.eps) if settings.divide_by_std else scale


def _with_advantage(trajectory: Trajectory, advantage: float) -> Trajectory:
    sequences = tuple(replace(s, advantage=advantage) for s in trajectory.sequences)
    return replace(trajectory, sequences=sequences)


def _require_rewards(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise InvalidInput(
            f"The group has {len(rewards)} rewards, and a baseline needs at least 2.",
            reason=Reason.GROUP_TOO_SMALL,
            remedy="Play at least two trajectories of each task.",
        )
    if not all(math.isfinite(reward) for reward in rewards):
        raise InvalidInput(
            f"One of the rewards {list(rewards)} is not finite.",
            reason=Reason.NON_FINITE_REWARD,
            remedy="Mark the trajectory as failed instead of giving it such a reward.",
        )


def require_complete(group: Group, group_size: int | None) -> None:
    """Raise PreconditionFailed (GROUP_INCOMPLETE) unless all members are there and scorable."""
    failed = [t.trajectory_id for t in group.trajectories if not t.is_scorable]
    is_short = group_size is not None and group.num_trajectories != group_size
    if failed or is_short:
        raise PreconditionFailed(
            f"Group {group.group_id} has {group.num_trajectories} trajectories of {group_size}. "
            f"These cannot be scored: {failed}.",
            reason=Reason.GROUP_INCOMPLETE,
            remedy="Retry the failed members, or drop the group and re-issue its task.",
        )
