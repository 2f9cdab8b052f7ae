"""Which sequences share a packed row: first-fit-decreasing, never splitting one.

plan_rows([5, 3, 4, 2], max_tokens=7)     # ((0, 3), (2, 1)): 5 + 2 and 4 + 3 tokens

Sequences that begin alike share a row as far as they fit, because a row computes what they have in
common once, and it counts once for the row. Where they do not fit, their forest is cut where the
least is computed twice. A beginning of less than 3 % of a sequence holds nothing together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_learning.rl.forest import Forest

_HIDDEN_SIZE = 1024
_LEAST_SHARED = 0.03
_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """Sequences that share a row. size: their tokens as a row counts them. cost: as `row_cost`."""

    indices: tuple[int, ...]
    size: int
    cost: float


def plan_rows(
    lengths: Sequence[int], *, max_tokens: int, forest: Forest | None = None, whole: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return rows of indices, each of at most `max_tokens` tokens; equal input gives equal rows.

    First-fit-decreasing needs at most 11/9 of the smallest number of rows, plus one (Johnson 1973).
    With a `forest` of the sequences a row counts what they have in common once or, with `whole`,
    each time, as where attention copies it.
    Raises InvalidInput for a sequence that is longer (SEQUENCE_TOO_LONG) or empty (EMPTY_SEQUENCE).
    """
    _require_fitting(lengths, max_tokens)
    bundles = _bundles(lengths, forest, max_tokens, whole=whole)
    return tuple(_indices(row) for row in _first_fit(bundles, max_tokens))


def _first_fit(bundles: Sequence[_Bundle], max_tokens: int) -> list[list[_Bundle]]:
    rows: list[list[_Bundle]] = []
    free: list[int] = []
    for bundle in bundles:
        row = next((r for r, room in enumerate(free) if room >= bundle.size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(max_tokens)
        rows[row].append(bundle)
        free[row] -= bundle.size
    return rows


def _indices(row: Sequence[_Bundle]) -> tuple[int, ...]:
    return tuple(index for bundle in row for index in bundle.indices)


def _bundles(
    lengths: Sequence[int], forest: Forest | None, max_tokens: int, *, whole: bool
) -> list[_Bundle]:
    """Return sequences that share a row, at most a row's worth each; the largest first."""
    order = range(len(lengths)) if forest is None else forest.order
    common = [0] * len(lengths) if forest is None else list(forest.common)
    bundles = []
    for first, end in _families(lengths, order, common):
        counted = [0 if whole else c for c in common[first:end]]
        own = [lengths[i] for i in order[first:end]]
        for start, stop in _cut(own, common[first:end], counted, max_tokens):
            inside = [0, *common[first + start + 1 : first + stop]]
            bundle = _Bundle(
                indices=tuple(order[first + start : first + stop]),
                size=sum(own[start:stop]) - sum(counted[start + 1 : stop]),
                cost=row_cost(own[start:stop]) - row_cost(inside),
            )
            bundles.append(bundle)
    return sorted(bundles, key=lambda bundle: (-bundle.size, bundle.indices))


def _families(
    lengths: Sequence[int], order: Sequence[int], common: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the places in `order` from which to which sequences have enough in common."""
    starts = [
        place
        for place, index in enumerate(order)
        if not place
        or common[place] <= _LEAST_SHARED * min(lengths[index], lengths[order[place - 1]])
    ]
    return pairwise([*starts, len(order)])


def _cut(
    lengths: Sequence[int], common: Sequence[int], counted: Sequence[int], max_tokens: int
) -> list[tuple[int, int]]:
    """Return where to cut a family so that the least is computed twice, then into the fewest parts.

    counted: of `common`, what a row counts once.
    """
    least: list[tuple[int, int]] = [(0, 0)]  # of the first n: tokens computed twice, and parts
    begins = [0]
    for end in range(1, len(lengths) + 1):
        best, size = (math.inf, 0, 0), 0
        for start in range(end - 1, -1, -1):
            if size + lengths[start] > max_tokens:
                break
            size += lengths[start] - counted[start]
            twice, parts = least[start]
            best = min(best, (twice + (common[start] if start else 0), parts + 1, start))
        least.append((int(best[0]), best[1]))
        begins.append(best[2])
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    return list(pairwise(cuts[::-1]))


def _require_fitting(lengths: Sequence[int], max_tokens: int) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise InvalidInput(
                f"Sequence {index} has {length} tokens.",
                reason=Reason.EMPTY_SEQUENCE,
                remedy="Leave out sequences without tokens.",
            )
        if length > max_tokens:
            raise InvalidInput(
                f"Sequence {index} has {length} tokens, more than the {max_tokens} of a row.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_row_tokens, shorten the episodes, or set oversize in [train].",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Rows of indices for every rank: ranks[r][k] is the k-th row of rank r.

    Every rank has the same number of rows, so that all join the same collectives; a rank with too
    few sequences ends with empty ones.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    def rows_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the rows of one rank that hold a sequence."""
        return tuple(row for row in self.ranks[rank] if row)


def row_cost(lengths: Sequence[int]) -> float:
    """Return what a row of sequences costs, in tokens of a short sequence.

    A decoder layer does about 12 h^2 multiplications for a token and 2 h for each token it attends
    to, L / 2 on average: L (1 + L / (12 h)), with h = 1024.
    """
    return sum(length * (1 + length / (12 * _HIDDEN_SIZE)) for length in lengths)


def plan_ranks(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_ranks: int,
    forest: Forest | None = None,
    whole: bool = False,
    alone: bool = False,
) -> RankPlan:
    """Plan rows of at most `max_tokens` tokens for each rank; no sequence is split.

    The k-th rows of all ranks wait for each other, so they cost about the same. plan_ranks([6, 4,
    3, 2], max_tokens=8, num_ranks=2) is ((0, 3),) and ((1, 2),). Without a forest no rank has more
    rows than `plan_rows` makes of all sequences. With one, what begins alike is cut into as many
    parts as make the ranks wait least, though each computes the beginning again. With `alone` each
    row is one sequence. Errors, `forest` and `whole` are those of `plan_rows`.
    """
    if alone:
        _require_fitting(lengths, max_tokens)
        bundles = _bundles(lengths, None, max_tokens, whole=whole)
        single = [[bundle] for bundle in bundles] + [[]] * (-len(bundles) % num_ranks)
        dealt = _deal(single, num_ranks)
        return RankPlan(ranks=tuple(tuple(map(_indices, rows)) for rows in dealt))
    if num_ranks == 1:
        rows = plan_rows(lengths, max_tokens=max_tokens, forest=forest, whole=whole)
        return RankPlan(ranks=(rows,))
    _require_fitting(lengths, max_tokens)
    longest, plans = max(lengths, default=0), []
    for parts in _PARTS if forest is not None and any(forest.common) else (1,):
        bundles = _bundles(lengths, forest, max(longest, max_tokens // parts), whole=whole)
        fitting = _first_fit(bundles, max_tokens)
        num_rows = -(-len(fitting) // num_ranks) * num_ranks
        level = _level([b for row in fitting for b in row], max_tokens, num_rows) or fitting
        level = [*level, *[[]] * (num_rows - len(level))]
        ranks = _deal(sorted(level, key=_cost, reverse=True), num_ranks)
        waiting = sum(max(map(_cost, rows)) for rows in zip(*ranks, strict=True))
        plans.append((waiting, parts, ranks))
    ranks = min(plans, key=lambda plan: plan[:2])[2]
    return RankPlan(ranks=tuple(tuple(map(_indices, rows)) for rows in ranks))


def _cost(row: Sequence[_Bundle]) -> float:
    return sum(bundle.cost for bundle in row)


def _level(
    bundles: Sequence[_Bundle], max_tokens: int, num_rows: int
) -> list[list[_Bundle]] | None:
    """Put the largest first into the emptiest row; return None where a bundle finds no room."""
    rows: list[list[_Bundle]] = [[] for _ in range(num_rows)]
    emptiest = [(0, row) for row in range(num_rows)]  # a heap of (tokens, row)
    for bundle in sorted(bundles, key=lambda b: (-b.size, b.indices)):
        tokens, row = emptiest[0]
        if tokens + bundle.size > max_tokens:
            return None
        rows[row].append(bundle)
        heapq.heapreplace(emptiest, (tokens + bundle.size, row))
    return rows


def _deal(rows: Sequence[list[_Bundle]], num_ranks: int) -> list[list[list[_Bundle]]]:
    """Deal rows of falling cost to the ranks in turns; in each turn the cheapest rank is first."""
    totals = [0.0] * num_ranks
    ranks: list[list[list[_Bundle]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(rows), num_ranks):
        cheapest_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, row in zip(cheapest_first, rows[start : start + num_ranks], strict=True):
            ranks[rank].append(row)
            totals[rank] += _cost(row)
    return ranks
