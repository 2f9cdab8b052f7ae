"""Buckets in powers of two: of how long answers are, and of how deep tokens lie in their context.

length_bin(1), length_bin(5), length_bin(8), length_bin(9)    # 1, 8, 8, 16
share_table({8: 3, 16: 1}, {8: 2})      # [(8, 0.75, 1.0), (16, 0.25, 0.0)]

A wrong position, a window that one side leaves out, or rounding that adds up shows in deep tokens
first, where the mean over all tokens hides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST = 128
"""Tokens in the first bucket; each further bucket is as long as all before it."""
LEAST_TOKENS = 64
"""A bucket with fewer tokens says nothing: one unlikely token makes half of its mean."""


def buckets_of(depths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket [M] of each depth [M], which is how many tokens precede it.

    A bucket is named by its smallest depth: 0, 128, 256, 512, 1024, ...
    """
    powers = np.floor(np.log2(np.maximum(depths, FIRST))).astype(np.int64)
    return np.where(depths < FIRST, 0, np.left_shift(np.int64(1), powers))


def mismatch_by_depth(
    depths: NDArray[np.int64], differences: NDArray[np.float64]
) -> dict[int, dict[str, float]]:
    """Return num_tokens, mismatch_kl, mean_difference and max_difference of each bucket.

    differences [M]: log-prob of the trainer minus the engine's, in nats. mismatch_kl is k3 of
    KL(engine, trainer) over the engine's tokens: the mean of r - 1 - log r, r the ratio of
    probabilities (Schulman, Approximating KL Divergence, 2020).
    """
    buckets = buckets_of(depths)
    table = {}
    for bucket in np.unique(buckets).tolist():
        own = differences[buckets == bucket]
        table[bucket] = {
            "num_tokens": float(len(own)),
            "mismatch_kl": float(np.mean(np.expm1(own) - own)),
            "mean_difference": float(np.mean(np.abs(own))),
            "max_difference": float(np.max(np.abs(own))),
        }
    return table


def first_above(by_depth: Mapping[int, Mapping[str, Any]], bound: float) -> int | None:
    """Return the first bucket with enough tokens whose mismatch_kl is above a bound, or NaN."""
    return next(
        (
            bucket
            for bucket, values in sorted(by_depth.items())
            if values["num_tokens"] >= LEAST_TOKENS and not values["mismatch_kl"] <= bound
        ),
        None,
    )


def length_bin(num_tokens: int) -> int:
    """Return the largest length of the bin: the smallest power of two that is not less, or 0."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens else 0


def share_table(
    generated: Mapping[int, int], trained: Mapping[int, int]
) -> list[tuple[int, float, float]]:
    """Return (largest length, share of generated, share of trained) of each bin, ascending."""
    num_generated, num_trained = sum(generated.values()), sum(trained.values())
    return [
        (
            longest,
            generated.get(longest, 0) / max(1, num_generated),
            trained.get(longest, 0) / max(1, num_trained),
        )
        for longest in sorted({*generated, *trained})
    ]
