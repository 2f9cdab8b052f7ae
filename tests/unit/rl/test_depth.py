from __future__ import annotations

import math

import numpy as np
import pytest
from dialoop_learning.rl.buckets import buckets_of, first_above, mismatch_by_depth


def test_a_bucket_is_named_by_its_smallest_depth() -> None:
    depths = np.array([0, 1, 127, 128, 255, 256, 511, 512, 1023, 1024, 16383, 16384])
    expected = [0, 0, 0, 128, 128, 256, 256, 512, 512, 1024, 8192, 16384]
    assert buckets_of(depths).tolist() == expected


def test_each_bucket_has_its_own_numbers() -> None:
    table = mismatch_by_depth(np.array([3, 300, 301]), np.array([0.0, math.log(2), -0.5]))
    assert list(table) == [0, 256]
    assert table[0] == {
        "num_tokens": 1,
        "mismatch_kl": 0,
        "mean_difference": 0,
        "max_difference": 0,
    }
    # r - 1 - log r: 2 - 1 - .693147 and .606531 - 1 + .5
    deep = table[256]
    assert deep["mismatch_kl"] == pytest.approx((0.306853 + 0.106531) / 2, abs=1e-6)
    assert deep["mean_difference"] == pytest.approx((math.log(2) + 0.5) / 2)
    assert deep["max_difference"] == pytest.approx(math.log(2))


def test_an_error_that_grows_with_depth_is_named_with_its_bucket() -> None:
    depths = np.arange(4096)
    differences = np.random.default_rng(0).normal(0, 1e-3, 4096) + (depths / 4096) ** 2 * 0.5
    table = mismatch_by_depth(depths, differences)
    # Half of .5 x .25 squared is about .008 at depth 2,048, and the bucket's mean is above .01.
    assert first_above(table, 1e-2) == 2048
    assert first_above(table, 1.0) is None
    assert sum(row["mismatch_kl"] * row["num_tokens"] for row in table.values()) / 4096 < 0.03


def test_a_bucket_of_few_tokens_says_nothing_and_nan_says_it_at_once() -> None:
    few = {0: {"num_tokens": 63, "mismatch_kl": 5.0}, 128: {"num_tokens": 64, "mismatch_kl": 0.0}}
    assert first_above(few, 1e-2) is None
    assert first_above({512: {"num_tokens": 64, "mismatch_kl": math.nan}}, 1e-2) == 512
