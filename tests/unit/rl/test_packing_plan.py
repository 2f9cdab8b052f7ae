import random

import pytest
from dialoop.errors import InvalidInput
from dialoop_learning.rl.packing_plan import RankPlan, plan_ranks, plan_rows, row_cost
from hypothesis import given
from hypothesis import strategies as st


def test_sequences_of_a_group_share_rows_as_far_as_they_fit() -> None:
    # Two groups of 4 + 3 + 2 and of 4 + 1: by length alone the two 4s would share the first row.
    plan = plan_rows([4, 3, 2, 4, 1], max_tokens=9, groups=[0, 0, 0, 1, 1])
    assert plan == ((0, 1, 2), (3, 4))
    assert plan_rows([4, 3, 2, 4, 1], max_tokens=9) == ((0, 3, 4), (1, 2))
    full = plan_rows([4, 3, 2, 4, 1], max_tokens=5, groups=[0, 0, 0, 1, 1])
    assert full == ((1, 2), (3, 4), (0,))


def test_groups_of_one_are_planned_as_without_groups() -> None:
    lengths = [5, 3, 4, 2, 7, 7, 1]
    assert plan_rows(lengths, max_tokens=8, groups=range(7)) == plan_rows(lengths, max_tokens=8)


def test_longest_first_into_the_first_row_with_room() -> None:
    assert plan_rows([5, 3, 4, 2], max_tokens=7) == ((0, 3), (2, 1))


def test_sequence_that_fills_a_row_exactly_fits() -> None:
    assert plan_rows([7, 7], max_tokens=7) == ((0,), (1,))


def test_no_lengths_make_no_rows() -> None:
    assert plan_rows([], max_tokens=7) == ()


def test_oversize_error_names_the_sequence() -> None:
    with pytest.raises(InvalidInput, match="Sequence 1 has 9 tokens") as caught:
        plan_rows([3, 9], max_tokens=7)
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


def test_empty_sequence_is_rejected() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_rows([3, 0], max_tokens=7)
    assert caught.value.reason == "EMPTY_SEQUENCE"


@given(st.lists(st.integers(1, 64), max_size=40))
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths: list[int]) -> None:
    plan = plan_rows(lengths, max_tokens=64)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in plan)
    assert plan == plan_rows(lengths, max_tokens=64)


def _costs(plan: RankPlan, lengths: list[int]) -> list[float]:
    return [sum(row_cost([lengths[i] for i in row]) for row in rows) for rows in plan.ranks]


def test_ranks_get_rows_of_similar_cost() -> None:
    plan = plan_ranks([6, 4, 3, 2], max_tokens=8, num_ranks=2)
    assert plan.ranks == (((0, 3),), ((1, 2),))


def test_one_rank_has_the_rows_of_the_plan_without_ranks() -> None:
    plan = plan_ranks([5, 3, 4, 2], max_tokens=7, num_ranks=1)
    assert plan.ranks == (plan_rows([5, 3, 4, 2], max_tokens=7),)


def test_ranks_without_a_sequence_get_empty_rows() -> None:
    plan = plan_ranks([5, 4], max_tokens=7, num_ranks=4)
    assert plan.ranks == (((0,),), ((1,),), ((),), ((),))
    assert plan.rows_of(2) == ()


def test_attention_makes_long_sequences_cost_more_than_their_tokens() -> None:
    assert row_cost([8192]) == pytest.approx(8192 * 5 / 3)
    assert row_cost([8192]) > row_cost([4096, 4096])


def test_ranks_are_balanced_on_log_normal_lengths() -> None:
    draw = random.Random(0)
    lengths = [min(4096, 64 + int(draw.lognormvariate(5.5, 1.0))) for _ in range(512)]
    for num_ranks in (2, 4, 8):
        costs = _costs(plan_ranks(lengths, max_tokens=8192, num_ranks=num_ranks), lengths)
        assert max(costs) <= 1.05 * sum(costs) / num_ranks


@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 5))
def test_every_sequence_is_on_one_rank_and_all_ranks_have_as_many_rows(
    lengths: list[int], num_ranks: int
) -> None:
    plan = plan_ranks(lengths, max_tokens=64, num_ranks=num_ranks)
    rows = [row for rank in plan.ranks for row in rank]
    needed = len(plan_rows(lengths, max_tokens=64))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert {len(rank) for rank in plan.ranks} == {-(-needed // num_ranks)}
    assert plan == plan_ranks(lengths, max_tokens=64, num_ranks=num_ranks)
