"""Beginnings that sequences of a packed row have in common, so that the model computes each once.

Two answers to one prompt, and what a causal model has to compute for them:

    packed_tokens   5 8 | 9 1 . 5 8 | 4      the row, as losses see it
    kept            0 1   2 3         6      tokens computed: the second 5 8 is the first one's
    places          0 1   2 3   0 1   4      where each of the row's tokens finds its result

A token's hidden state depends only on the tokens before it in its sequence and on the experts that
are replayed for them, so sharing is exact where both are equal.
The gradients of all sequences that share a token add up in it. The eight answers of a GRPO group
cost one prompt instead of eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """The K tokens of a packed row of T tokens that the model has to compute.

    kept: int64 [K], rising positions in the row. places: int64 [T], each token's index among the K.
    """

    kept: Tensor
    places: Tensor


def share_prefixes(
    tokens: Tensor, lengths: tuple[int, ...], experts: Tensor | None = None
) -> SharedPrefixes:
    """Find the common beginnings of the row's N sequences; tokens int64 [T], T the sum of lengths.

    experts: [T, layers, k] that are replayed. In lexicographic order a sequence shares the longest
    beginning with a neighbour.
    """
    ids = tokens.cpu().numpy()
    if experts is not None:
        ids = _number_pairs(ids, experts.cpu().numpy())
    starts = [0, *accumulate(lengths)]
    owners = np.arange(starts[-1])
    # Big-endian bytes sort in the order of the ids.
    ordered = sorted(
        range(len(lengths)), key=lambda i: ids[starts[i] : starts[i + 1]].astype(">i8").tobytes()
    )
    for before, after in pairwise(ordered):
        first, second = starts[before], starts[after]
        common = _num_common(ids[first : starts[before + 1]], ids[second : starts[after + 1]])
        owners[second : second + common] = owners[first : first + common]
    own = owners == np.arange(starts[-1])
    places = (np.cumsum(own) - 1)[owners]
    return SharedPrefixes(
        kept=torch.from_numpy(np.flatnonzero(own)), places=torch.from_numpy(places)
    )


def _number_pairs(ids: NDArray[np.int64], experts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Return a number for each pair of a token and its experts; equal pairs have the same."""
    numbers: dict[tuple[int, bytes], int] = {}
    pairs = zip(ids.tolist(), experts, strict=True)
    keys = ((token, own.tobytes()) for token, own in pairs)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _num_common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return how many ids both sequences begin with."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size
