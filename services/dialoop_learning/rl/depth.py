"""How far engine and trainer are apart, by the depth of a token in its context.

A wrong position, a window that one side leaves out, or rounding that adds up shows in deep tokens
first, where the mean over all tokens hides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

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
