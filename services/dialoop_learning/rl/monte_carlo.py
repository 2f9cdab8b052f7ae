"""torchrl's MCAdvantage: advantages of turns (steps of an episode) within one group.

    step_advantages([[0.0], [1.0]])                    # [[-0.7071], [0.7071]]
    trajectory_advantages([[0.0, 1.0], [0.0, 3.0]])    # sums 1 and 3: [[-.7071] * 2, [.7071] * 2]

`step_advantages` normalises each turn's reward among all turns of the group, so a long trajectory
weighs more in the mean. `trajectory_advantages` normalises one number per trajectory among those of
the group and gives it to each of the trajectory's turns. Both compute what torchrl's MCAdvantage
computes, except where rewards differ by at most eps: torchrl divides by 1e-6 there, ours are 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dialoop_learning.rl.advantages import (
    AdvantageSettings,
    Aggregate,
    group_advantages,
    has_dense_rewards,
    require_complete,
    return_of,
    with_token_advantages,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.sequences import Floats
    from dialoop.sequences import Sequence as TokenSequence
    from dialoop.trajectory import Group, Trajectory


def step_advantages(
    rewards: Sequence[Sequence[float]], settings: AdvantageSettings | None = None
) -> list[list[float]]:
    """Return (r - mean) / max(std, eps) of each turn's reward, over all turns of the group.

    `rewards` holds one list per trajectory, with one reward per turn. The result has the same
    shape. The formula is MCAdvantage's of torchrl 0.14. leave_one_out plays no part. Raises
    InvalidInput (GROUP_TOO_SMALL) for fewer than 2 trajectories, and (NON_FINITE_REWARD).
    """
    if len(rewards) < 2:
        group_advantages([0.0] * len(rewards), settings)  # raises GROUP_TOO_SMALL
    settings = replace(settings or AdvantageSettings(), leave_one_out=False)
    flat = iter(group_advantages([r for turns in rewards for r in turns], settings).values)
    return [[next(flat) for _ in turns] for turns in rewards]


def trajectory_advantages(
    rewards: Sequence[Sequence[float]],
    settings: AdvantageSettings | None = None,
    *,
    aggregate: Aggregate = "sum",
) -> list[list[float]]:
    """Return the advantage of each trajectory's sum, max or mean of rewards, at each of its turns.

    The shapes of `rewards` and of the result are those of `step_advantages`.
    """
    returns = [return_of(turns, aggregate) for turns in rewards]
    values = group_advantages(returns, settings).values
    return [[value] * len(turns) for value, turns in zip(values, rewards, strict=True)]


def with_turn_advantages(
    group: Group, settings: AdvantageSettings | None = None, *, group_size: int | None = None
) -> Group:
    """Return the group with `token_advantages` set: float32 [M] for the M sampled tokens.

    Each token gets the `step_advantages` of its turn. A dense reward counts from its token to the
    end of the turn. Raises PreconditionFailed (GROUP_INCOMPLETE) as `with_advantages` does.
    """
    require_complete(group, group_size)
    if has_dense_rewards(group):
        plain = replace(settings or AdvantageSettings(), leave_one_out=False)
        return with_token_advantages(group, plain, per_turn=True)
    rewards = [[turn.reward for turn in t.turns] for t in group.trajectories]
    pairs = zip(group.trajectories, step_advantages(rewards, settings), strict=True)
    return replace(group, trajectories=tuple(_spread(t, values) for t, values in pairs))


def _spread(trajectory: Trajectory, of_turns: Sequence[float]) -> Trajectory:
    sequences = tuple(
        replace(s, token_advantages=_of_tokens(s, of_turns)) for s in trajectory.sequences
    )
    return replace(trajectory, sequences=sequences)


def _of_tokens(sequence: TokenSequence, of_turns: Sequence[float]) -> Floats:
    runs = [
        np.full(s.length, of_turns[s.turn], dtype=np.float32)
        for s in sequence.segments
        if s.policy_version is not None
    ]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.float32)
