"""The priority of a scored group: how much its advantages move the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dialoop import testing
from dialoop.trajectory import Group
from dialoop_learning.rl.advantages import mean_absolute_advantage


def group_of(*advantages: float | list[float] | None) -> Group:
    group = testing.group(*(0.0 for _ in advantages))
    trajectories = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        (sequence,) = trajectory.sequences
        if isinstance(advantage, list):
            values = np.resize(np.array(advantage, np.float32), sequence.num_model_tokens)
            sequence = replace(sequence, token_advantages=values)
        else:
            sequence = replace(sequence, advantage=advantage)
        trajectories.append(replace(trajectory, sequences=(sequence,)))
    return replace(group, trajectories=tuple(trajectories))


def test_it_is_the_mean_size_of_the_advantages() -> None:
    assert mean_absolute_advantage(group_of(1.0, -0.5)) == pytest.approx(0.75)
    assert mean_absolute_advantage(group_of([2.0], [-2.0])) == pytest.approx(2.0)


def test_a_group_of_which_nothing_is_learned_comes_last() -> None:
    assert mean_absolute_advantage(group_of(0.0, 0.0)) == 0.0
    assert mean_absolute_advantage(group_of(None, None)) == 0.0
