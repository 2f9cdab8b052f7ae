"""Our advantages and those of TRL and torchrl of the same rewards; see test_learning_peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dialoop_learning.rl.advantages import AdvantageSettings, group_advantages
from dialoop_learning.rl.monte_carlo import step_advantages, trajectory_advantages
from dialoop_services.scorer.rewards import token_kl

from tests.goldens.losses_samples import GROUP_SIZE, TURN_REWARDS, variant
from tests.support.samples.peer_losses import peer_goldens

TRL = peer_goldens("trl")
TORCHRL = peer_goldens("torchrl")


def _of_groups(rewards: list[float], **settings: bool) -> list[float]:
    """Our advantages of the two groups of three."""
    groups = [rewards[:GROUP_SIZE], rewards[GROUP_SIZE:]]
    advantages = [group_advantages(group, AdvantageSettings(**settings)) for group in groups]
    return [value for group in advantages for value in group.values]


def test_group_advantages_equal_trls() -> None:
    rewards = TRL["tensors"]["rewards"]
    plain = _of_groups(rewards, divide_by_std=False)
    assert plain == pytest.approx(TRL["advantages"]["none"], abs=1e-9)
    others = _of_groups(rewards, divide_by_std=False, leave_one_out=True)
    assert others == pytest.approx(TRL["advantages"]["rloo"], abs=1e-9)


def test_trl_adds_1e_4_to_the_deviation_that_we_divide_by() -> None:
    rewards = TRL["tensors"]["rewards"]
    expected = []
    for group in (rewards[:GROUP_SIZE], rewards[GROUP_SIZE:]):
        ours = group_advantages(group)
        expected += [value * ours.std / (ours.std + 1e-4) for value in ours.values]
    assert expected == pytest.approx(TRL["advantages"]["group"], abs=1e-9)


def test_trls_rloo_takes_our_k1_penalty_from_the_rewards() -> None:
    tensors = variant(TRL["tensors"], "all_trained")
    policy, ref = (np.array(tensors[name]) for name in ("old", "ref"))
    kl = (token_kl(policy, ref) * np.array(tensors["trained"])).sum(1)
    rewards = [r - 0.1 * float(k) for r, k in zip(tensors["rewards"], kl, strict=True)]
    ours = _of_groups(rewards, divide_by_std=False, leave_one_out=True)
    # token_kl is float32.
    assert ours == pytest.approx(TRL["advantages"]["rloo_kl"], abs=1e-6)


def test_trl_normalizes_rloo_over_the_sequences_of_the_batch() -> None:
    plain = torch.tensor(TRL["advantages"]["rloo"], dtype=torch.float64)
    expected = (plain - plain.mean()) / (plain.std(correction=1) + 1e-4)
    assert expected.tolist() == pytest.approx(TRL["advantages"]["rloo_normalized"], abs=1e-9)


def test_turn_advantages_equal_torchrls() -> None:
    for ours, golden in zip(
        step_advantages(TURN_REWARDS), TORCHRL["advantages"]["step"], strict=True
    ):
        assert ours == pytest.approx(golden, abs=1e-9)


@pytest.mark.parametrize("aggregate", ["sum", "max", "mean"])
def test_trajectory_advantages_equal_torchrls(aggregate: Any) -> None:
    advantages = trajectory_advantages(TURN_REWARDS, aggregate=aggregate)
    for ours, golden in zip(advantages, TORCHRL["advantages"][aggregate], strict=True):
        assert ours == pytest.approx(golden, abs=1e-9)


def test_a_spread_below_eps_is_an_advantage_to_torchrl_only() -> None:
    golden = TORCHRL["advantages"]["almost_uniform"]
    assert golden == [[pytest.approx(-0.25)], [pytest.approx(0.25)]]
    assert trajectory_advantages([[0.0], [5e-7]]) == [[0.0], [0.0]]
