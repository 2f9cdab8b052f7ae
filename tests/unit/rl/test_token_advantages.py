"""Advantages of tokens for rewards that have one number for each token, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from dialoop import testing
from dialoop.errors import InvalidInput
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Group, Reward, Trajectory, Turn
from dialoop_learning.rl.advantages import AdvantageSettings, with_advantages
from dialoop_learning.rl.monte_carlo import with_turn_advantages

VERSION = PolicyVersion(lineage="main", number=0)
HALF_ROOT = math.sqrt(0.5)
CENTRED = AdvantageSettings(divide_by_std=False)

Rewards = Sequence[Reward]


def plain(value: float) -> Reward:
    return Reward(name="r", value=value)


def dense(*values: float, weight: float = 1.0) -> Reward:
    return Reward.dense("d", values, weight=weight)


def member(name: str, *turns: tuple[int, Rewards], forks: bool = False) -> Trajectory:
    """A trajectory of (number of sampled tokens, rewards) turns, in one sequence or one each."""
    pieces = [
        [
            ([5, 6], {"source": Source.PROMPT, "turn": number}),
            ([7] * count, {"source": Source.MODEL, "turn": number, "policy_version": VERSION}),
        ]
        for number, (count, _) in enumerate(turns)
    ]
    rows = pieces if forks else [[piece for own in pieces for piece in own]]
    return testing.trajectory(
        trajectory_id=name,
        turns=tuple(
            Turn(message_start=1, num_messages=1, rewards=tuple(rewards)) for _, rewards in turns
        ),
        sequences=tuple(sequence_of(row) for row in rows),
    )


def group(*trajectories: Trajectory) -> Group:
    return testing.group(*trajectories)


def values(scored: Group) -> list[list[list[float]]]:
    """The advantages of each trajectory's sequences."""
    return [[s.token_advantages.tolist() for s in t.sequences] for t in scored.trajectories]


def two_answers() -> Group:
    """To come at the tokens: -3, -2 and then 0; -1, -1, 0."""
    return group(
        member("a", (2, [plain(0.0), dense(-1.0, -2.0)])),
        member("b", (3, [plain(1.0), dense(0.0, -1.0, -1.0)])),
    )


def test_a_token_counts_the_dense_rewards_from_it_on() -> None:
    # means -2, -1.5, 0
    assert values(with_advantages(two_answers(), CENTRED)) == [[[-1.0, -0.5]], [[1.0, 0.5, 0.0]]]


def test_each_index_is_divided_by_its_own_deviation() -> None:
    scored = values(with_advantages(two_answers()))
    assert scored[0] == [pytest.approx([-HALF_ROOT, -HALF_ROOT])]
    assert scored[1] == [pytest.approx([HALF_ROOT, HALF_ROOT, 0.0])]


def test_leave_one_out_compares_each_token_with_the_others() -> None:
    settings = AdvantageSettings(divide_by_std=False, leave_one_out=True)
    assert values(with_advantages(two_answers(), settings)) == [[[-2.0, -1.0]], [[2.0, 1.0, 0.0]]]


def test_weights_of_dense_rewards_count() -> None:
    both = group(
        member("a", (2, [dense(1.0, 1.0, weight=0.5)])), member("b", (2, [dense(0.0, 0.0)]))
    )
    assert values(with_advantages(both, CENTRED)) == [[[0.5, 0.25]], [[-0.5, -0.25]]]


@pytest.mark.parametrize("forks", [False, True])
def test_dense_rewards_of_later_turns_count_for_earlier_ones_and_across_forks(forks: bool) -> None:
    # to come: 4 = 1 + 3, 3 | 2, 1 + 0 ... of the second trajectory: 0 everywhere
    turns = ((1, [dense(1.0)]), (2, [plain(1.0), dense(1.0, 1.0)]))
    both = group(member("a", *turns, forks=forks), member("b", (1, [plain(0.0)])))
    first = values(with_advantages(both, CENTRED))[0]
    assert first == ([[2.0], [1.5, 1.0]] if forks else [[2.0, 1.5, 1.0]])


def test_with_advantages_of_turns_a_dense_reward_counts_to_the_end_of_its_turn() -> None:
    both = group(
        member("a", (1, [dense(1.0)]), (2, [plain(1.0), dense(1.0, 2.0)])),
        member("b", (1, [plain(0.0)])),
    )
    # to come in the three turns: 1 then 0; 4, 3; 0 then 0. Means 5/3, and 1 at the second token.
    first, second = values(with_turn_advantages(both, CENTRED))
    assert first == [pytest.approx([1 - 5 / 3, 4 - 5 / 3, 3 - 3 / 3])]
    assert second == [pytest.approx([-5 / 3])]


def test_dense_rewards_of_zero_change_no_number() -> None:
    rewards = (0.3, 0.7, 0.1)
    scalar = group(*(member(str(i), (2, [plain(r)])) for i, r in enumerate(rewards)))
    zeros = group(
        *(member(str(i), (2, [plain(r), dense(0.0, 0.0)])) for i, r in enumerate(rewards))
    )
    for settings in (
        AdvantageSettings(),
        CENTRED,
        AdvantageSettings(leave_one_out=True),
        AdvantageSettings(divisor="sum", eps=1e-4),
    ):
        expected = [
            t.sequences[0].advantage for t in with_advantages(scalar, settings).trajectories
        ]
        tokens = values(with_advantages(zeros, settings))
        assert tokens == [[pytest.approx([value] * 2, rel=1e-7)] for value in expected]


@pytest.mark.parametrize(
    ("rewards", "aggregate", "reason"),
    [
        ([dense(1.0)], "sum", "RAGGED"),
        ([dense(1.0, 1.0)], "max", "DENSE_REWARD_NOT_SUMMED"),
        ([dense(1.0, math.inf)], "sum", "NON_FINITE_REWARD"),
    ],
)
def test_dense_rewards_that_cannot_be_counted_say_why(
    rewards: Rewards, aggregate: str, reason: str
) -> None:
    wrong = group(member("a", (2, rewards)), member("b", (2, [plain(1.0)])))
    with pytest.raises(InvalidInput) as caught:
        with_advantages(wrong, AdvantageSettings(aggregate=aggregate))  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_a_group_of_one_is_a_named_error() -> None:
    with pytest.raises(InvalidInput) as caught:
        with_advantages(group(member("a", (1, [dense(1.0)]))))
    assert caught.value.reason == "GROUP_TOO_SMALL"
