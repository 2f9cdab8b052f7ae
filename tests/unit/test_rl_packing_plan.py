import pytest
from dialoop.errors import InvalidInput
from hypothesis import given
from hypothesis import strategies as st

from services.rl.packing_plan import plan_rows


def test_longest_first_into_the_first_row_with_room() -> None:
    assert plan_rows([5, 3, 4, 2], max_tokens=7).rows == ((0, 3), (2, 1))


def test_sequence_that_fills_a_row_exactly_fits() -> None:
    assert plan_rows([7, 7], max_tokens=7).rows == ((0,), (1,))


def test_no_lengths_make_no_rows() -> None:
    assert plan_rows([], max_tokens=7).rows == ()


def test_oversize_error_names_the_sequence() -> None:
    with pytest.raises(InvalidInput, match="trajectory-b") as caught:
        plan_rows([3, 9], max_tokens=7, names=["trajectory-a", "trajectory-b"])
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


def test_oversize_can_be_dropped_and_is_reported() -> None:
    plan = plan_rows([3, 9, 2], max_tokens=7, oversize="drop")
    assert (plan.rows, plan.dropped) == (((0, 2),), (1,))


def test_empty_sequence_is_rejected() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_rows([3, 0], max_tokens=7)
    assert caught.value.reason == "EMPTY_SEQUENCE"


@given(st.lists(st.integers(1, 64), max_size=40))
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths: list[int]) -> None:
    plan = plan_rows(lengths, max_tokens=64)
    assert sorted(i for row in plan.rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in plan.rows)
    assert plan == plan_rows(lengths, max_tokens=64)
