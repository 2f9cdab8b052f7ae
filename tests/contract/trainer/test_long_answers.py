"""Long answers are trained as often as they are generated."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dialoop_learning.rl.buckets import length_bin, share_table

from tests.support.loop.rl_loop import run_loop
from tests.support.loop.virtual_time import run_virtually

SLOW = 17  # tokens; a fast answer has fewer


def share_of_slow(lengths: list[int]) -> float:
    return sum(length >= SLOW for length in lengths) / len(lengths)


def two_sample_p(first: list[int], second: list[int]) -> float:
    """P-value of the two-sample Kolmogorov-Smirnov test, by its asymptotic distribution.

    Q(t) = 2 sum_k (-1)^(k-1) exp(-2 k^2 t^2) with t = D sqrt(n m / (n + m)); with ties it is
    conservative.
    """
    values = np.unique([*first, *second])
    reached_first, reached_second = (
        np.searchsorted(np.sort(sample), values, side="right") / len(sample)
        for sample in (first, second)
    )
    scale = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    t = float(np.abs(reached_first - reached_second).max()) * scale
    if t < 0.2:  # the series does not converge there, and the value is 1 to 10 digits
        return 1.0
    return float(sum(2 * (-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101)))


def test_the_two_sample_test_finds_long_answers_that_were_lost():
    lengths = [12] * 900 + [240] * 100
    assert two_sample_p(lengths, lengths) == 1.0
    assert two_sample_p(lengths, [12] * 900 + [240] * 5) < 1e-3


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.heavy(reason="more seeds")) for s in (1, 2))]
)
def test_slow_answers_are_trained_in_proportion(tmp_path: Path, seed: int):
    """Batches and groups have their default sizes; one answer in ten takes 20 times as long."""
    run = run_virtually(
        run_loop(
            tmp_path,
            seed=seed,
            num_steps=8,
            groups_per_train_step=16,
            collector={"group_size": 8},
        )
    )
    assert len(run.trained) == 8 * 16 * 8
    assert len(run.generated) > 1000
    assert run.training.num_groups_dropped == {}, "then these would be part of the account"
    ratio = share_of_slow(run.trained) / share_of_slow(run.generated)
    assert ratio == pytest.approx(1.0, abs=0.15)
    assert two_sample_p(run.generated, run.trained) > 1e-3


def test_the_summarys_lengths_show_what_staleness_takes(tmp_path: Path):
    """With small batches a slow answer spans more versions than max_staleness allows."""
    run = run_virtually(
        run_loop(tmp_path, seed=0, num_steps=12, groups_per_train_step=8, max_staleness=2)
    )
    assert run.training.num_groups_dropped["stale"] > 0
    generated, trained = run.counters["training"]["lengths"], run.result["trained_lengths"]
    assert Counter(generated) == Counter(map(length_bin, run.generated))
    assert Counter(trained) == Counter(map(length_bin, run.trained))
    slow = [row for row in share_table(generated, trained) if row[0] >= SLOW]
    assert sum(share for _, _, share in slow) < 0.8 * sum(share for _, share, _ in slow)


def test_staleness_alone_takes_the_long_answers_of_small_batches(tmp_path: Path):
    """The same run with room for the versions that a slow answer spans trains in proportion."""
    run = run_virtually(
        run_loop(tmp_path, seed=0, num_steps=12, groups_per_train_step=8, max_staleness=8)
    )
    assert run.training.num_groups_dropped == {}
    ratio = share_of_slow(run.trained) / share_of_slow(run.generated)
    assert ratio == pytest.approx(1.0, abs=0.15)
