"""Distributions of lengths: what was played beside what was trained, in bins of powers of two.

length_bin(1), length_bin(5), length_bin(8), length_bin(9)    # 1, 8, 8, 16
share_table({8: 3, 16: 1}, {8: 2})      # [(8, 0.75, 1.0), (16, 0.25, 0.0)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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
