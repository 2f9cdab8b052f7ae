from __future__ import annotations

from itertools import combinations

import pytest
from dialoop_ops.runs.intervals import (
    Interval,
    difference_of,
    difference_of_shares,
    gain_of,
    mean_of,
    paired_difference,
    pass_at_k,
    share_of,
    wilson_interval,
)


def test_the_interval_of_three_values_is_students_with_two_degrees_of_freedom() -> None:
    # mean .92; standard error sqrt(.0004 / 3) = .011547; t(.975, 2) = 4.302653 from a table.
    interval = mean_of([0.90, 0.94, 0.92])
    assert interval.mean == pytest.approx(0.92)
    assert interval.high == pytest.approx(0.92 + 4.302653 * 0.0115470, abs=1e-6)
    assert interval.low == pytest.approx(0.92 - 4.302653 * 0.0115470, abs=1e-6)


@pytest.mark.parametrize(("count", "t"), [(2, 12.706205), (11, 2.228139), (31, 2.042272)])
def test_the_quantiles_are_those_of_the_tables(count: int, t: float) -> None:
    interval = mean_of([float(number % 2) for number in range(count)])
    mean = interval.mean
    variance = sum((number % 2 - mean) ** 2 for number in range(count)) / (count - 1)
    assert interval.high == pytest.approx(mean + t * (variance / count) ** 0.5, abs=1e-6)


def test_one_value_has_no_interval() -> None:
    interval = mean_of([0.5])
    assert (interval.mean, interval.low, interval.high) == (0.5, None, None)


def test_pairs_are_made_by_key_and_others_are_left_out() -> None:
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t(.975, 2) = 4.302653.
    values = {"a": 2.0, "b": 4.0, "c": 6.0, "x": 9.0}
    interval = paired_difference(values, {"c": 3.0, "b": 2.0, "a": 1.0, "y": 5.0})
    assert interval is not None
    assert (interval.mean, interval.num_values) == (2.0, 3)
    assert interval.low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-6)
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_welchs_interval() -> None:
    # Variances 5/3 and 26.75/3 over 4: standard error 1.6266, 4.08 degrees of freedom, t 2.7545.
    interval = difference_of([2, 4, 6, 9], [1, 2, 3, 4])
    assert interval.mean == 2.75
    assert interval.high == pytest.approx(7.2305, abs=2e-3)
    assert interval.low == pytest.approx(-1.7305, abs=2e-3)
    assert difference_of([1], [1, 2]).low is None
    constant = difference_of([3, 3], [1, 1])
    assert (constant.low, constant.high) == (2, 2)


def test_the_interval_of_shares_stays_within_0_and_1() -> None:
    # Student's t of two values: .25 within -.39 and .89.
    assert (mean_of([0.2, 0.3]).low or 0) < 0
    interval = share_of([0.2, 0.3])
    # .25 * .75 / .05² = 75 trials, t(.975, 1) = 12.7062, t² / n = 2.15264.
    assert interval.mean == pytest.approx(0.25)
    assert interval.low == pytest.approx(0.024261, abs=1e-6)
    assert interval.high == pytest.approx(0.817141, abs=1e-6)
    assert str(interval) == "0.25 (0.024 to 0.82)"
    for values in ([0.0, 1.0], [0.0, 0.01], [0.99, 1.0], [0.5, 0.5, 0.9]):
        low, high = share_of(values).low, share_of(values).high
        assert low is not None
        assert high is not None
        assert 0 <= low < sum(values) / len(values) < high <= 1
        gains = gain_of([2 * value - 1 for value in values])
        assert gains.low == pytest.approx(2 * low - 1)
        assert gains.high == pytest.approx(2 * high - 1)


def test_shares_that_agree_are_as_sure_as_their_trials() -> None:
    interval = share_of([1.0, 1.0], num_trials=128)
    assert (interval.low, interval.high) == pytest.approx(wilson_interval(1.0, 128))
    assert share_of([0.5]).low is None


def test_newcombes_interval() -> None:
    # Newcombe 1998, table II, method 10, example (a): 56/70 - 48/80 is within .0524 and .3339.
    shares = [
        Interval(mean=p, low=low, high=high, num_values=1)
        for p, (low, high) in ((p, wilson_interval(p, n)) for p, n in ((0.8, 70), (0.6, 80)))
    ]
    interval = difference_of_shares(*shares)
    assert interval.mean == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_pass_at_k_is_the_share_of_draws_with_a_pass() -> None:
    passed = [True, True, False, False, False]
    for k in (1, 2, 3, 4, 5):
        draws = list(combinations(passed, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="k is 6"):
        pass_at_k(5, 2, 6)
