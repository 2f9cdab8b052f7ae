"""Means with 95 % confidence intervals, over seeds or over tasks, and differences of two means.

`mean_of([.90, .94, .92])` is .92 within .870 and .970: Student's t with two degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance

from mpmath import mp

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % confidence interval; `low` and `high` are None below 2 values."""

    mean: float
    low: float | None
    high: float | None
    num_values: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3g}"
        above, below = self.high - self.mean, self.mean - self.low
        if math.isclose(above, below, rel_tol=1e-6, abs_tol=1e-12):
            return f"{self.mean:.3g} ± {above:.2g}"
        return f"{self.mean:.3g} ({self.low:.2g} to {self.high:.2g})"


def mean_of(values: Sequence[float]) -> Interval:
    """Return the mean of one or more values, with the interval by Student's t over them."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean=mean, low=None, high=None, num_values=count)
    return _around(mean, math.sqrt(variance(values) / count), count - 1, count)


def share_of(values: Sequence[float], *, num_trials: int = 0) -> Interval:
    """Return the mean of values between 0 and 1, with an interval that stays there.

    It is Wilson's with Student's t, and with as many trials as would let a share vary as the mean
    does (Dean and Pagano, J. Survey Stat. Methodol. 3, 2015). Where all values agree it is Wilson's
    own of `num_trials`; 0: of one trial a value.
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean=mean, low=None, high=None, num_values=count)
    if spread := variance(values) / count:
        trials, z = mean * (1 - mean) / spread, _t_quantile(count - 1)
        low, high = wilson_interval(mean, trials, z=z)
    else:
        low, high = wilson_interval(mean, num_trials or count)
    return Interval(mean=mean, low=low, high=high, num_values=count)


def gain_of(values: Sequence[float], *, num_trials: int = 0) -> Interval:
    """Return the mean of differences of shares, as `share_of` does, within -1 and 1."""
    inner = share_of([(1 + value) / 2 for value in values], num_trials=num_trials)
    ends = [None if end is None else 2 * end - 1 for end in (inner.low, inner.high)]
    return Interval(mean=fmean(values), low=ends[0], high=ends[1], num_values=inner.num_values)


def difference_of_shares(share: Interval, baseline: Interval) -> Interval:
    """Return the difference of two independent shares, with Newcombe's interval from theirs.

    It is his method 10 (Statist. Med. 17, 1998), and stays within -1 and 1. There is none where a
    side has none.
    """
    difference, count = share.mean - baseline.mean, share.num_values + baseline.num_values
    if share.low is None or share.high is None or baseline.low is None or baseline.high is None:
        return Interval(mean=difference, low=None, high=None, num_values=count)
    below = math.hypot(share.mean - share.low, baseline.high - baseline.mean)
    above = math.hypot(share.high - share.mean, baseline.mean - baseline.low)
    return Interval(
        mean=difference, low=difference - below, high=difference + above, num_values=count
    )


def paired_difference(
    values: Mapping[str, float], baseline: Mapping[str, float]
) -> Interval | None:
    """Return the mean of values minus baseline over the keys that both have; None without any.

    Pairing takes out what a task, or a seed, adds to both sides.
    """
    shared = [key for key in values if key in baseline]
    return mean_of([values[key] - baseline[key] for key in shared]) if shared else None


def difference_of(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the difference of two independent means, with Welch's interval.

    Its degrees of freedom are those of Welch and Satterthwaite (Biometrika 34, 1947). There is no
    interval where a side has fewer than 2 values.
    """
    difference = fmean(values) - fmean(baseline)
    count = len(values) + len(baseline)
    if min(len(values), len(baseline)) < 2:
        return Interval(mean=difference, low=None, high=None, num_values=count)
    a, b = variance(values) / len(values), variance(baseline) / len(baseline)
    if not a + b:
        return Interval(mean=difference, low=difference, high=difference, num_values=count)
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(baseline) - 1))
    return _around(difference, math.sqrt(a + b), freedom, count)


_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def wilson_interval(share: float, count: float, *, z: float = _Z) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` trials, by Wilson (JASA 22, 1927).

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n): it stays within 0..1 and has a width where
    all trials agree.
    """
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - half) / scale, (middle + half) / scale


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the chance that at least one of k answers passes, estimated from num_samples answers.

    1 - C(n - c, k) / C(n, k), without bias (Chen et al., Evaluating Large Language Models Trained
    on Code, 2021). Raises ValueError unless 1 <= k <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, and there are {num_samples} answers")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _around(mean: float, error: float, freedom: float, count: int) -> Interval:
    half = _t_quantile(freedom) * error
    return Interval(mean=mean, low=mean - half, high=mean + half, num_values=count)


@cache
def _t_quantile(freedom: float) -> float:
    """Return Student's t that CONFIDENCE of the values lie within, on either side of 0.

    By the regularised incomplete beta function: P(|T| > t) = I_x(v / 2, 1 / 2), x = v / (v + t^2).
    """

    def excess(t: float) -> float:
        x = freedom / (freedom + t * t)
        outside = mp.betainc(freedom / 2, 0.5, 0, x, regularized=True)
        return float(outside) - (1 - CONFIDENCE)

    low, high = 0.0, 1e3  # one degree of freedom, the widest, has 12.7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
