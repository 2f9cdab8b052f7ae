"""Beginnings that sequences of a packed row have in common, so that each is computed once.

Two answers to one prompt, and what a causal model has to compute of them:

    packed_tokens   5 8 | 9 1 . 5 8 | 4      the row, as losses see it
    kept            0 1   2 3         6      tokens computed: the second 5 8 is the first one's
    places          0 1   2 3   0 1   4      where each of the row's tokens finds its result

What a token's hidden state depends on is the tokens before it in its sequence, so sharing is exact;
the gradients of all who share a token add up in it. The eight answers of a GRPO group cost one
prompt instead of eight.
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
    """Of a packed row of T tokens, the K that have to be computed.

    kept: int64 [K], positions in the row, rising. places: int64 [T], which of the K each token is.
    """

    kept: Tensor
    places: Tensor


def share_prefixes(tokens: Tensor, lengths: tuple[int, ...]) -> SharedPrefixes:
    """Find the common beginnings of the row's sequences; tokens int64 [T], lengths N that add up.

    In lexicographic order no other sequence shares more with one than its neighbour does.
    """
    ids = tokens.cpu().numpy()
    starts = [0, *accumulate(lengths)]
    owners = np.arange(starts[-1])
    # Big-endian bytes sort as the ids do.
    ordered = sorted(
        range(len(lengths)), key=lambda i: ids[starts[i] : starts[i + 1]].astype(">i8").tobytes()
    )
    for before, one in pairwise(ordered):
        first, second = starts[before], starts[one]
        common = _common(ids[first : starts[before + 1]], ids[second : starts[one + 1]])
        owners[second : second + common] = owners[first : first + common]
    own = owners == np.arange(starts[-1])
    places = (np.cumsum(own) - 1)[owners]
    return SharedPrefixes(
        kept=torch.from_numpy(np.flatnonzero(own)), places=torch.from_numpy(places)
    )


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many ids two sequences begin with in common."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
