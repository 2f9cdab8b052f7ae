"""Which rank trains which rows, and the passes that ranks make together.

    plan = plan_step(rows, [[0, 2], [1, 3]], ranks, max_tokens=4096)    # on the first rank
    share = plan.own                                                    # on every rank, once sent
    packed = pack_own([share.rows[i] for i in share.orders[0]], share.packings[0], ranks)

The first rank plans, balanced by tokens and by attention's cost, and every row goes once to each
rank that trains it. With several epochs that may be another rank each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from dialoop_learning.model.forest_attention import copies_keys
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows, plant_rows
from dialoop_learning.parallel.ranks import Ranks, reshard
from dialoop_learning.rl.packing_plan import plan_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dialoop_learning.model.policy import PolicyModel

Packing = tuple[tuple[int, ...], ...]
"""Which rows share each packed row, as indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The rows of a step that one rank trains.

    indices: of the rows among the step's. orders: for each update the places in `rows` of those
    that it trains. packings: for each update which places of its order share a packed row.
    """

    rows: tuple[TokenRow, ...]
    indices: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    packings: tuple[Packing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The share of each rank in a step's rows; a rank that got a plan sees its own share alone.

    num_trained: trained tokens of each update. num_given: tokens of all updates, and num_distinct:
    how many distinct prefixes they have.
    """

    shares: tuple[RankShare, ...]
    num_trained: tuple[int, ...]
    num_given: int
    num_distinct: int

    @property
    def own(self) -> RankShare:
        """Return this rank's share; before the plan is sent, the first rank's."""
        return self.shares[0]

    @property
    def num_updates(self) -> int:
        """Return how many updates the step takes."""
        return len(self.num_trained)

    def of_rank(self, rank: int) -> StepPlan:
        """Return what a rank is sent."""
        return StepPlan(
            shares=(self.shares[rank],),
            num_trained=self.num_trained,
            num_given=self.num_given,
            num_distinct=self.num_distinct,
        )


def plan_step(
    rows: Sequence[TokenRow], updates: Sequence[Sequence[int]], ranks: Ranks, *, max_tokens: int
) -> StepPlan:
    """Plan updates, each of the rows with the indices that it names, over all ranks."""
    forests = [plant_rows([rows[i] for i in order]) for order in updates]
    plans = [
        plan_ranks(
            forest.lengths,
            max_tokens=max_tokens,
            num_ranks=ranks.num_row_ranks,
            forest=forest,
            whole=copies_keys(ranks.device),
            alone=ranks.cp > 1,
        )
        for forest in forests
    ]
    shares = [
        _share(rows, updates, [plan.rows_of(row_rank) for plan in plans])
        for row_rank in range(ranks.num_row_ranks)
    ]
    return StepPlan(
        shares=tuple(share for share in shares for _ in range(ranks.cp)),
        num_trained=tuple(num_trained_in([rows[i] for i in order]) for order in updates),
        num_given=sum(sum(forest.lengths) for forest in forests),
        num_distinct=sum(forest.num_distinct for forest in forests),
    )


def _share(
    rows: Sequence[TokenRow], updates: Sequence[Sequence[int]], packings: Sequence[Packing]
) -> RankShare:
    """Return the share that trains so packed rows of each update; packings are in its order."""
    places = [sorted(place for row in packing for place in row) for packing in packings]
    own = [[order[p] for p in kept] for order, kept in zip(updates, places, strict=True)]
    indices = sorted({index for order in own for index in order})
    numbers = {index: number for number, index in enumerate(indices)}
    renumbered = []
    for kept, packing in zip(places, packings, strict=True):
        at = {place: number for number, place in enumerate(kept)}
        renumbered.append(tuple(tuple(at[place] for place in row) for row in packing))
    return RankShare(
        rows=tuple(rows[i] for i in indices),
        indices=tuple(indices),
        orders=tuple(tuple(numbers[i] for i in order) for order in own),
        packings=tuple(renumbered),
    )


def num_trained_in(rows: Sequence[TokenRow]) -> int:
    """Return how many tokens of the rows are trained."""
    return sum(int(row.response_mask.sum()) for row in rows)


def own_rows(rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int) -> list[PackedBatch]:
    """Return this rank's share of `rows`, packed, on its device; all ranks pass the same rows."""
    plan = plan_step(rows, [range(len(rows))], ranks, max_tokens=max_tokens)
    share = plan.shares[ranks.rank]
    return pack_own(share.rows, share.packings[0], ranks)


def pack_own(rows: Sequence[TokenRow], packing: Packing, ranks: Ranks) -> list[PackedBatch]:
    """Return the rows packed so, on this rank's device; with `cp` padded so that it divides."""
    return [_pack([rows[i] for i in indices], ranks) for indices in packing]


def _pack(rows: Sequence[TokenRow], ranks: Ranks) -> PackedBatch:
    pad_to = None
    if ranks.cp > 1:
        chunks = 2 * ranks.cp
        pad_to = -(-sum(len(row.token_ids) for row in rows) // chunks) * chunks
    return pack_rows(rows, pad_to=pad_to).to(ranks.device)


def rows_behind(num_rows: int, ranks: Ranks) -> int:
    """Return how many rows fewer than the busiest rank this one has."""
    most: int = max(ranks.gather(num_rows))
    return most - num_rows


def keep_pace(policy: PolicyModel, num_rows: int, ranks: Ranks) -> None:
    """Run `num_rows` forward and backward passes that train nothing.

    All ranks together gather a sharded layer, so each rank must run it as often as the busiest
    does. Call `rows_behind` before the first row, because that is a collective too.
    """
    nothing = torch.zeros(2, dtype=torch.bool)
    idle = TokenRow(token_ids=torch.zeros(2).long(), response_mask=nothing)
    for _ in range(num_rows):
        logprobs = policy(_pack([idle], ranks)).logprobs
        if logprobs.requires_grad:
            logprobs.sum().backward()


@torch.no_grad()
def score_rows(
    policy: PolicyModel, rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int
) -> list[Tensor]:
    """Return log-probs float32 [M] of each of this rank's own rows, at the row's temperature."""
    alone = Ranks(cp=ranks.cp, size=ranks.cp, device=ranks.device)
    plan = plan_step(rows, [range(len(rows))], alone, max_tokens=max_tokens)
    packing = plan.own.packings[0]
    num_behind = rows_behind(len(packing), ranks)
    scores = [
        policy(row, temperature=row.temperature).logprobs.float().cpu()
        for row in pack_own(rows, packing, ranks)
    ]
    keep_pace(policy, num_behind, ranks)
    reshard(policy)
    order = [i for indices in packing for i in indices]
    values = torch.cat([torch.empty(0), *scores])
    ends = [0, *accumulate(int(rows[i].response_mask.sum()) for i in order)]
    by_row = {i: values[ends[k] : ends[k + 1]] for k, i in enumerate(order)}
    return [by_row[i] for i in range(len(rows))]


def gather_scores(own: Sequence[Tensor], plan: StepPlan, ranks: Ranks) -> list[Tensor]:
    """Return the scores of all rows of a plan, in their order, on the first rank; [] elsewhere."""
    parts = ranks.gather_tensors(torch.cat([torch.empty(0), *own]))
    if not ranks.is_first:
        return []
    by_row: dict[int, Tensor] = {}
    for share, part in zip(plan.shares, parts, strict=True):
        ends = [0, *accumulate(int(row.response_mask.sum()) for row in share.rows)]
        by_row |= {i: part[ends[k] : ends[k + 1]] for k, i in enumerate(share.indices)}
    return [by_row[i] for i in sorted(by_row)]
