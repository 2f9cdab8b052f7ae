"""Group advantages: how much better a trajectory did than the others of its task.

group_advantages([0.0, 1.0]).values        # (-0.7071, 0.7071): (reward - mean) / std
group_advantages([1.0, 1.0]).is_uniform    # True, values (0.0, 0.0): nothing to learn from

A reward may have one number for each token. Two answers with the rewards 0 and 1, and such a dense
reward on the tokens of each:

    reward 0, dense (-1, -2)      to come at each token:  -3  -2
    reward 1, dense (0, -1, -1)                           -1  -1   0

What is to come at a token is the reward of the whole row and the dense rewards from this token on.
At each token index the rows are compared as `group_advantages` compares rewards. A row that has
ended has only its reward to come. Without dense rewards each token gets its trajectory's advantage.
`infra/decisions/0019-dense-rewards-count-from-their-token-on.md` says why.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_learning.rl.turn_tokens import TurnTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dialoop.sequences import Floats
    from dialoop.trajectory import Group, Trajectory
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]

Aggregate = Literal["sum", "max", "mean"]
Divisor = Literal["max", "sum"]

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
    divisor: "max" is max(std, eps), torchrl's way. A group whose rewards differ by at most eps then
    counts as uniform. "sum" is std + eps, the way of TRL and torchtune, which take eps 1e-4.
    aggregate: how the rewards of its turns make a trajectory's reward.
    """

    divide_by_std: bool = True
    leave_one_out: bool = False
    eps: float = 1e-6
    divisor: Divisor = "max"
    aggregate: Aggregate = "sum"

    def normalise(self, rewards: Doubles) -> Doubles:
        """Return the advantages [n, T] of each column of n finite rewards [n, T], n at least 2."""
        size = len(rewards)
        scale = size / (size - 1) if self.leave_one_out else 1.0
        std = rewards.std(axis=0, ddof=1)
        divisor = std + self.eps if self.divisor == "sum" else np.maximum(std, self.eps)
        values = (rewards - rewards.mean(axis=0)) * (
            scale / divisor if self.divide_by_std else scale
        )
        # A uniform group gets exactly 0: rounding in the mean must not become an advantage.
        spread = rewards.max(axis=0) - rewards.min(axis=0)
        return np.where(spread <= self.largest_uniform_spread, 0.0, values)

    @property
    def largest_uniform_spread(self) -> float:
        """Return by how much rewards may differ that count as the same."""
        return self.eps if self.divisor == "max" else 0.0


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
    """Return the advantages of n rewards: n values (r_i - baseline) / divisor.

    The formula is GRPO's with outcome supervision (arXiv 2402.03300, section 4.1.2). The baseline
    is the mean of all rewards or, with `leave_one_out`, of the others (RLOO, arXiv 2402.14740).
    The divisor is max(std, eps) or std + eps, where std is the standard deviation over n - 1.
    Without `divide_by_std` it is 1 (Dr. GRPO, arXiv 2503.20783).

    TRL and torchtune divide by std + 1e-4. TRL's RLOOTrainer leaves one out as here, but it
    normalises over all sequences of the batch. torchrl's way is `dialoop_learning.rl.monte_carlo`.

    Raises InvalidInput (GROUP_TOO_SMALL) for fewer than 2 rewards, which have no baseline, and
    InvalidInput (NON_FINITE_REWARD) for a reward that is infinite or not a number.
    """
    settings = settings or AdvantageSettings()
    _require_rewards(rewards)
    values = settings.normalise(np.array(rewards, dtype=np.float64)[:, None])[:, 0]
    return GroupAdvantages(
        values=tuple(map(float, values)),
        mean=statistics.fmean(rewards),
        std=statistics.stdev(rewards),
        is_uniform=max(rewards) - min(rewards) <= settings.largest_uniform_spread,
    )


def with_advantages(
    group: Group, settings: AdvantageSettings | None = None, *, group_size: int | None = None
) -> Group:
    """Return the group with `advantage` set: one number per trajectory, on all its sequences.

    The numbers are those of `group_advantages`. With a reward that has one number for each token,
    the group has `token_advantages` instead. Raises PreconditionFailed (GROUP_INCOMPLETE) when
    the group does not hold `group_size` trajectories or one of them failed through no fault of the
    policy, because a partial group has a wrong baseline.
    """
    require_complete(group, group_size)
    settings = settings or AdvantageSettings()
    if has_dense_rewards(group):
        return with_token_advantages(group, settings)
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
    _require_finite(rewards)


def _require_finite(rewards: Sequence[float]) -> None:
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


def has_dense_rewards(group: Group) -> bool:
    """Return whether any reward of the group has one number for each token."""
    return any(
        reward.per_token
        for trajectory in group.trajectories
        for turn in trajectory.turns
        for reward in turn.rewards
    )


def with_token_advantages(
    group: Group, settings: AdvantageSettings, *, per_turn: bool = False
) -> Group:
    """Return the group with `token_advantages` set: float32 [M] for the M sampled tokens.

    A row is a trajectory or, with `per_turn`, each turn: then dense rewards count to the end of
    their turn, and the turns of all trajectories are compared. Raises InvalidInput (RAGGED) for a
    dense reward with another number of values than its turn has tokens, (DENSE_REWARD_NOT_SUMMED)
    where `settings.aggregate` is not "sum", and what `group_advantages` raises.
    """
    returns_of(group)  # raises
    _require_summed(settings)
    tokens = [TurnTokens.of(trajectory) for trajectory in group.trajectories]
    rewards = [_rewards_of(t, own) for t, own in zip(group.trajectories, tokens, strict=True)]
    if per_turn:
        rows = [row for of_turns in rewards for row in of_turns]
    else:
        rows = [(sum(s for s, _ in r), np.concatenate([d for _, d in r])) for r in rewards]
    advantages = iter(_token_advantages(rows, settings))
    trajectories = []
    for trajectory, own in zip(group.trajectories, tokens, strict=True):
        if per_turn:
            of_turns = [next(advantages) for _ in own.counts]
        else:
            of_turns = np.split(next(advantages), list(accumulate(own.counts))[:-1])
        trajectories.append(_with_token_values(trajectory, own.scatter(of_turns)))
    return replace(group, trajectories=tuple(trajectories))


def _token_advantages(
    rows: Sequence[tuple[float, Doubles]], settings: AdvantageSettings
) -> list[Doubles]:
    """Return float64 [M] of each row (its reward, its M dense rewards), index by index."""
    longest = max(len(dense) for _, dense in rows)
    to_come = np.zeros((len(rows), longest))
    for row, (reward, dense) in zip(to_come, rows, strict=True):
        row[: len(dense)] = np.cumsum(dense[::-1])[::-1]
        row += reward
    normal = settings.normalise(to_come)
    return [values[: len(dense)] for values, (_, dense) in zip(normal, rows, strict=True)]


def _rewards_of(trajectory: Trajectory, tokens: TurnTokens) -> list[tuple[float, Doubles]]:
    """Return of each turn the sum of its plain rewards, and the sums [M] of its dense ones."""
    rows = []
    for number, count in enumerate(tokens.counts):
        plain, dense = 0.0, np.zeros(count)
        # A failure of the policy may end the trajectory after its tokens and before its turn.
        for reward in trajectory.turns[number].rewards if number < len(trajectory.turns) else ():
            if not reward.per_token:
                plain += reward.value * reward.weight
                continue
            if len(reward.per_token) != count:
                raise InvalidInput(
                    f"Reward {reward.name} of trajectory {trajectory.trajectory_id} has "
                    f"{len(reward.per_token)} numbers, and its turn {number} has {count} sampled "
                    "tokens.",
                    reason=Reason.RAGGED,
                    remedy="Give one number for each sampled token of the turn.",
                )
            dense += np.array(reward.per_token) * reward.weight
        _require_finite([plain, float(dense.sum())])
        rows.append((plain, dense))
    return rows


def _with_token_values(trajectory: Trajectory, values: Sequence[Floats]) -> Trajectory:
    pairs = zip(trajectory.sequences, values, strict=True)
    sequences = tuple(replace(s, advantage=None, token_advantages=own) for s, own in pairs)
    return replace(trajectory, sequences=sequences)


def _require_summed(settings: AdvantageSettings) -> None:
    if settings.aggregate != "sum":
        raise InvalidInput(
            f"A reward has one number for each token, and advantage_aggregate is "
            f"{settings.aggregate}.",
            reason=Reason.DENSE_REWARD_NOT_SUMMED,
            remedy='Set advantage_aggregate to "sum" in [scorer], or give rewards of one number.',
        )


def mean_absolute_advantage(group: Group) -> float:
    """Return the mean of |advantage| over the group's sampled tokens: how much it moves the policy.

    The priority of a scored group, 0 where nothing is to be learned.
    """
    total = num_tokens = 0.0
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            num_tokens += sequence.num_model_tokens
            if len(sequence.token_advantages):
                total += float(abs(sequence.token_advantages).sum())
            else:
                total += abs(sequence.advantage or 0.0) * sequence.num_model_tokens
    return total / num_tokens if num_tokens else 0.0
