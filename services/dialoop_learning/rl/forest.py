"""Sequences that begin alike, as one forest: each distinct prefix is one token of it.

    sequence 0     5 8 9 1           forest     5 8 - 4
    sequence 1     5 8 4                          |
    sequence 2     7                              9 1      7

In lexicographic order a sequence has the longest beginning in common with a neighbour, and the
tokens of a subtree lie side by side: 5 8 4 9 1 7. So a cut between two neighbours costs what they
have in common and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """An unbranched run of tokens, by places in the forest's order.

    start to end are its own, end to stop those of what follows it. depth: the position of its first
    token in a sequence.
    """

    start: int
    end: int
    stop: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """N sequences in lexicographic order.

    lengths: those of the sequences as they were given. order: their indices. common: for each of
    `order` the number of tokens that it has in common with the one before it.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    common: tuple[int, ...]

    @property
    def num_distinct(self) -> int:
        """Return how many distinct prefixes the sequences have."""
        return sum(self.lengths) - sum(self.common)

    def runs(self) -> list[Run]:
        """Return the unbranched runs, a run before what follows it."""
        done: list[Run] = []
        path: list[tuple[int, int, int]] = []  # open runs: start, end, depth
        num = 0

        def close(common: int) -> None:
            """Close what is open beyond the first `common` tokens; cut the run that goes on."""
            while path and path[-1][2] + path[-1][1] - path[-1][0] > common:
                start, end, depth = path.pop()
                middle = start + max(common - depth, 0)
                if middle > start:
                    path.append((start, middle, depth))
                done.append(Run(middle, end, num, depth + middle - start))

        for index, common in zip(self.order, self.common, strict=True):
            close(common)
            own = self.lengths[index] - common
            if own and path and path[-1][1] == num:  # it goes on where a whole sequence ends
                start, end, depth = path.pop()
                path.append((start, end + own, depth))
            elif own:
                path.append((num, num + own, common))
            num += own
        close(0)
        return sorted(done)


def plant(sequences: Sequence[NDArray[np.int64]]) -> Forest:
    """Return the forest of sequences of ids; in the order given where no two begin alike."""
    lengths = tuple(map(len, sequences))
    # Big-endian bytes sort in the order of the ids.
    keys = [ids.astype(">i8").tobytes() for ids in sequences]
    order = sorted(range(len(lengths)), key=keys.__getitem__)
    common = [_num_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    if not any(common):
        order = list(range(len(lengths)))
    return Forest(lengths=lengths, order=tuple(order), common=(0, *common)[: len(order)])


def _num_common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return how many ids both sequences begin with."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def number_pairs(ids: NDArray[np.int64], experts: NDArray[np.int16] | None) -> NDArray[np.int64]:
    """Return a number for each pair of a token and its experts [layers, k], equal for equal ones.

    Without experts a token's number is its id.
    """
    if experts is None:
        return ids
    numbers: dict[tuple[int, bytes], int] = {}
    pairs = zip(ids.tolist(), experts, strict=True)
    keys = ((token, own.tobytes()) for token, own in pairs)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
