"""MCAdvantage: advantages of turns (steps of an episode) within one group.

    step_advantages([[0.0], [1.0]])                    # [[-0.7071], [0.7071]]
    trajectory_advantages([[0.0, 1.0], [0.0, 3.0]])    # sums 1 and 3: [[-.7071] * 2, [.7071] * 2]

Both are torchrl's MCAdvantage. step: every turn's reward is normalised among all turns of the
group, so a long trajectory weighs more in the mean. trajectory: one number per trajectory is
normalised among the group's and given to each of its turns. Only where rewards differ by no more
than eps is there a difference: torchrl divides by 1e-6, ours are 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dialoop_services.rl.advantages import (
    AdvantageSettings,
    Aggregate,
    group_advantages,
    require_complete,
    return_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.sequences import Floats
    from dialoop.sequences import Sequence as TokenSequence
    from dialoop.trajectory import Group, Trajectory


def step_advantages(
    rewards: Sequence[Sequence[float]], settings: AdvantageSettings | None = None
) -> list[list[float]]:
    """(r - mean) / max(std, eps) of each turn's reward, over all turns of the group.

    `rewards` has the turns of each trajectory; leave_one_out plays no part. Raises InvalidInput
    (GROUP_TOO_SMALL) for a group of one trajectory, and (NON_FINITE_REWARD).
    """
    if len(rewards) < 2:
        group_advantages([0.0] * len(rewards), settings)  # says that a group of one has no baseline
    settings = replace(settings or AdvantageSettings(), leave_one_out=False)
    flat = iter(group_advantages([r for turns in rewards for r in turns], settings).values)
    return [[next(flat) for _ in turns] for turns in rewards]


def trajectory_advantages(
    rewards: Sequence[Sequence[float]],
    settings: AdvantageSettings | None = None,
    *,
    aggregate: Aggregate = "sum",
) -> list[list[float]]:
    """The advantage of each trajectory's sum, max or mean of rewards, at each of its turns."""
    returns = [return_of(turns, aggregate) for turns in rewards]
    values = group_advantages(returns, settings).values
    return [[value] * len(turns) for value, turns in zip(values, rewards, strict=True)]


def with_turn_advantages(
    group: Group, settings: AdvantageSettings | None = None, *, group_size: int | None = None
) -> Group:
    """The group with `token_advantages`: each sampled token has its turn's `step_advantages`.

    Raises PreconditionFailed (GROUP_INCOMPLETE) as `with_advantages` does.
    """
    require_complete(group, group_size)
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
