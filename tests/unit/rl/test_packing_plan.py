import random
from collections.abc import Iterable

import numpy as np
import pytest
from dialoop.errors import InvalidInput
from dialoop_learning.rl.forest import Forest, plant
from dialoop_learning.rl.packing_plan import RankPlan, plan_ranks, plan_rows, row_cost
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.servers.forest_way import make_trace


def _forest(*rows: list[int]) -> Forest:
    return plant([np.array(row) for row in rows])


def _num_distinct(rows: Iterable[list[int]]) -> int:
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


def _traces(draw: random.Random, num: int) -> list[list[int]]:
    """Sequences of which each goes on where another was, at some place."""
    known: list[list[int]] = [[]]
    for _ in range(num):
        before = draw.choice(known)
        own = [draw.randrange(3) for _ in range(draw.randint(1, 12))]
        known.append((before[: draw.randint(0, len(before))] + own)[:40])
    return known[1:]


def test_what_sequences_share_counts_once_for_a_row() -> None:
    # By length alone 5 and 4 would not share a row of 7 tokens; 2 of them begin alike.
    forest = _forest([1, 2, 3, 4, 5], [1, 2, 6, 7], [9, 9])
    assert plan_rows([5, 4, 2], max_tokens=7, forest=forest) == ((0, 1), (2,))
    assert plan_rows([5, 4, 2], max_tokens=7, forest=forest, whole=True) == ((0, 2), (1,))


def test_a_family_is_cut_where_the_least_is_computed_twice() -> None:
    # Two pairs that share 4 tokens each, and 2 with the other pair.
    rows = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4], [1, 1, 5, 5, 6], [1, 1, 5, 5, 7]]
    forest = _forest(*rows)
    assert plan_rows([5] * 4, max_tokens=10, forest=forest) == ((0, 1, 2, 3),)
    assert plan_rows([5] * 4, max_tokens=9, forest=forest) == ((0, 1), (2, 3))


def test_a_beginning_that_is_short_beside_its_sequences_holds_nothing_together() -> None:
    rows = [[1, *[n] * 99] for n in (2, 3)]
    assert plan_rows([100, 100], max_tokens=150, forest=_forest(*rows)) == ((0,), (1,))


def test_sequences_that_share_nothing_are_planned_as_without_a_forest() -> None:
    lengths = [5, 3, 4, 2, 7, 7, 1]
    forest = _forest(*([n] * length for n, length in enumerate(lengths)))
    for whole in (False, True):
        plan = plan_rows(lengths, max_tokens=8, forest=forest, whole=whole)
        assert plan == plan_rows(lengths, max_tokens=8)


@given(st.randoms(use_true_random=False), st.integers(0, 25), st.booleans(), st.integers(1, 4))
def test_every_sequence_is_in_one_row_that_computes_no_more_than_its_budget(
    draw: random.Random, num: int, whole: bool, num_ranks: int
) -> None:
    rows = _traces(draw, num)
    forest = _forest(*rows)
    assert forest.num_distinct == _num_distinct(rows)
    plan = plan_ranks(
        [len(row) for row in rows], max_tokens=48, num_ranks=num_ranks, forest=forest, whole=whole
    )
    every = [row for rank in plan.ranks for row in rank]
    assert sorted(i for row in every for i in row) == list(range(num))
    assert len({len(rank) for rank in plan.ranks}) == 1
    for row in every:
        own = [rows[i] for i in row]
        assert (sum(map(len, own)) if whole else _num_distinct(own)) <= 48


@given(st.randoms(use_true_random=False), st.integers(0, 25))
def test_runs_of_a_forest_are_its_unbranched_paths(draw: random.Random, num: int) -> None:
    rows = _traces(draw, num)
    forest = _forest(*rows)
    runs = forest.runs()
    assert [run.start for run in runs] == [0, *(run.end for run in runs)][: len(runs)]
    sequences = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    for run in runs:
        below = [o for o in runs if run.end <= o.start < run.stop]
        assert sum(o.end - o.start for o in below) == run.stop - run.end
        assert all(o.depth >= run.depth + run.end - run.start for o in below)
    assert sum(run.end - run.start for run in runs) == len(sequences)


@pytest.mark.parametrize("name", ["turns", "forks", "sub_agents"])
def test_conversations_that_reuse_tokens_seven_times_are_forwarded_once(name: str) -> None:
    trace = make_trace(name, 1.0)
    rows = [ids for ids, _, _ in trace.sequences]
    forest = _forest(*rows)
    assert forest.num_distinct == trace.num_distinct
    assert trace.num_tokens > 6.9 * forest.num_distinct
    plan = plan_rows([len(row) for row in rows], max_tokens=12_288, forest=forest)
    num_forwarded = sum(_forest(*(rows[i] for i in row)).num_distinct for row in plan)
    assert num_forwarded <= 1.03 * forest.num_distinct


def test_ranks_part_a_family_where_waiting_costs_more_than_its_beginning() -> None:
    long = [[*range(10), *[20 + n] * 50] for n in range(8)]
    one = plan_ranks([60] * 8, max_tokens=600, num_ranks=1, forest=_forest(*long))
    assert one.ranks == ((tuple(range(8)),),)
    two = plan_ranks([60] * 8, max_tokens=600, num_ranks=2, forest=_forest(*long))
    assert [len(row) for (row,) in two.ranks] == [4, 4]


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
