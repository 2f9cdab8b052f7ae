"""Which sequences share a packed row: first-fit-decreasing, never splitting one.

plan_rows([5, 3, 4, 2], max_tokens=7)     # ((0, 3), (2, 1)): 5 + 2 and 4 + 3 tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

_HIDDEN_SIZE = 1024


def plan_rows(
    lengths: Sequence[int], *, max_tokens: int, groups: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return rows of indices, each of at most `max_tokens` tokens; equal lengths give equal rows.

    First-fit-decreasing needs at most 11/9 of the smallest number of rows, plus one (Johnson 1973).
    With `groups` (one number for each sequence) the plan keeps the sequences of a group together,
    as many as a row holds, because a row computes what they have in common once.
    Raises InvalidInput for a sequence that is longer (SEQUENCE_TOO_LONG) or empty (EMPTY_SEQUENCE).
    """
    _require_fitting(lengths, max_tokens)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bundles = [[i] for i in longest_first]
    if groups is not None:
        bundles = _bundles(longest_first, lengths, max_tokens, groups)
    rows: list[list[int]] = []
    free: list[int] = []
    for bundle in bundles:
        size = sum(lengths[i] for i in bundle)
        row = next((r for r, room in enumerate(free) if room >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(max_tokens)
        rows[row] += bundle
        free[row] -= size
    return tuple(map(tuple, rows))


def _bundles(
    longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int, groups: Sequence[int]
) -> list[list[int]]:
    """Bundle sequences of one group, at most a row's worth each; return the largest first."""
    bundles: list[list[int]] = []
    last: dict[int, list[int]] = {}
    for index in longest_first:
        bundle = last.get(groups[index])
        if bundle is None or sum(lengths[i] for i in bundle) + lengths[index] > max_tokens:
            bundle = last[groups[index]] = []
            bundles.append(bundle)
        bundle.append(index)
    return sorted(bundles, key=lambda bundle: (-sum(lengths[i] for i in bundle), bundle[0]))


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
    groups: Sequence[int] | None = None,
) -> RankPlan:
    """Plan rows of at most `max_tokens` tokens for each rank; no sequence is split.

    The k-th rows of all ranks wait for each other, so they cost about the same. No rank has more
    rows than `plan_rows` makes of all sequences. plan_ranks([6, 4, 3, 2], max_tokens=8,
    num_ranks=2) is ((0, 3),) and ((1, 2),). Errors are those of `plan_rows`. `groups` counts for
    one rank only; several ranks balance sequences wherever their group is.
    """
    if num_ranks == 1:
        return RankPlan(ranks=(plan_rows(lengths, max_tokens=max_tokens, groups=groups),))
    plan = plan_rows(lengths, max_tokens=max_tokens)
    num_rows = -(-len(plan) // num_ranks)

    def cost(row: Sequence[int]) -> float:
        return row_cost([lengths[i] for i in row])

    fitting = [i for row in plan for i in row]
    rows = _level(fitting, lengths, max_tokens, num_rows * num_ranks) or list(plan)
    rows = [*rows, *[()] * (num_rows * num_ranks - len(rows))]
    return RankPlan(ranks=_deal(sorted(rows, key=cost, reverse=True), num_ranks, cost))


def _level(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, num_rows: int
) -> list[tuple[int, ...]] | None:
    """Put the longest first into the emptiest row; return None where a sequence finds no room."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    emptiest = [(0, row) for row in range(num_rows)]  # a heap of (tokens, row)
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        tokens, row = emptiest[0]
        if tokens + lengths[index] > max_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(emptiest, (tokens + lengths[index], row))
    return [tuple(row) for row in rows]


def _deal(
    rows: Sequence[tuple[int, ...]], num_ranks: int, cost: Callable[[Sequence[int]], float]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal rows of falling cost to the ranks in turns; in each turn the cheapest rank is first."""
    totals = [0.0] * num_ranks
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(rows), num_ranks):
        cheapest_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, row in zip(cheapest_first, rows[start : start + num_ranks], strict=True):
            ranks[rank].append(row)
            totals[rank] += cost(row)
    return tuple(map(tuple, ranks))
