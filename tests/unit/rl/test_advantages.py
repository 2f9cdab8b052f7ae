import math

import numpy as np
import pytest
from dialoop import testing
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Failure, Owner, Trajectory
from dialoop_learning.rl.advantages import AdvantageSettings, group_advantages, with_advantages


def _trajectory(reward: float, *, failures: tuple[Failure, ...] = ()) -> Trajectory:
    version = PolicyVersion(lineage="main", number=0)
    sequence = sequence_of(
        [
            ([5, 6], {"source": Source.PROMPT}),
            ([7], {"source": Source.MODEL, "policy_version": version}),
        ],
        logprobs=[-0.5],
    )
    sequences = (sequence, sequence)
    return testing.trajectory(reward=reward, sequences=sequences, failures=failures)


def test_zero_and_one_become_minus_and_plus_half_the_root_of_two() -> None:
    advantages = group_advantages([0.0, 1.0])
    assert advantages.values == pytest.approx((-0.70710678, 0.70710678))
    assert (advantages.mean, advantages.std) == pytest.approx((0.5, 0.70710678))
    assert not advantages.is_uniform


def test_golden_group_of_four_with_unbiased_std() -> None:
    # mean 0.25, squared distances 3 * 0.0625 + 0.5625 = 0.75, std = sqrt(0.75 / 3) = 0.5
    assert group_advantages([0, 0, 0, 1]).values == pytest.approx((-0.5, -0.5, -0.5, 1.5))


def test_without_std_only_the_mean_is_subtracted() -> None:
    settings = AdvantageSettings(divide_by_std=False)
    assert group_advantages([0.0, 1.0], settings).values == (-0.5, 0.5)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    settings = AdvantageSettings(divide_by_std=False, leave_one_out=True)
    assert group_advantages([0.0, 3.0, 3.0], settings).values == pytest.approx((-3.0, 1.5, 1.5))


def test_group_of_one_is_a_named_error() -> None:
    with pytest.raises(InvalidInput) as caught:
        group_advantages([1.0])
    assert caught.value.reason == "GROUP_TOO_SMALL"


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_uniform_group_is_exactly_zero(reward: float) -> None:
    advantages = group_advantages([reward] * 3)
    assert advantages.values == (0.0, 0.0, 0.0)
    assert advantages.is_uniform


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_rejected(reward: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        group_advantages([0.0, reward])
    assert caught.value.reason == "NON_FINITE_REWARD"


def test_every_sequence_of_a_trajectory_gets_its_advantage() -> None:
    scored = with_advantages(testing.group(_trajectory(0.0), _trajectory(1.0)), group_size=2)
    advantages = [[s.advantage for s in t.sequences] for t in scored.trajectories]
    assert np.allclose(advantages, [[-0.70710678] * 2, [0.70710678] * 2])


def test_partial_group_is_refused() -> None:
    with pytest.raises(PreconditionFailed) as caught:
        with_advantages(testing.group(_trajectory(0.0), _trajectory(1.0)), group_size=3)
    assert caught.value.reason == "GROUP_INCOMPLETE"


def test_group_with_an_infrastructure_failure_is_refused() -> None:
    failed = _trajectory(0.0, failures=(Failure(owner=Owner.TOOL, reason="KILLED", message=""),))
    with pytest.raises(PreconditionFailed):
        with_advantages(testing.group(_trajectory(1.0), failed))


def test_dividing_by_std_plus_eps_is_torchtunes_and_trls_way() -> None:
    # (r - mean) / (std + 1e-4): -0.5 / 0.70720678, and nothing counts as uniform but equal rewards
    settings = AdvantageSettings(divisor="sum", eps=1e-4)
    assert group_advantages([0.0, 1.0], settings).values == pytest.approx(
        (-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)), abs=1e-12
    )
    close = group_advantages([0.0, 1e-5], settings)
    assert not close.is_uniform
    half = 5e-6 / (1e-5 * math.sqrt(0.5) + 1e-4)
    assert close.values == pytest.approx((-half, half))
    assert group_advantages([0.1, 0.1], settings).values == (0.0, 0.0)
