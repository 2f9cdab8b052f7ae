"""Rows over ranks: which rank packs which rows, idle passes, and log-probs from all ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.parallel.ranks import reshard
from dialoop_learning.rl.packing_plan import plan_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.packing.rows import PackedBatch
    from dialoop_learning.parallel.ranks import Ranks


def own_rows(rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int) -> list[PackedBatch]:
    """Return this rank's share of `rows`, packed, on its device; all ranks pass the same rows."""
    return pack_own(rows, own_packing(rows, ranks, max_tokens=max_tokens), ranks)


def own_packing(
    rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return which of `rows` share each packed row of this rank, as indices."""
    plan = plan_ranks(
        [len(r.token_ids) for r in rows],
        max_tokens=max_tokens,
        num_ranks=ranks.size,
        groups=[r.group_index for r in rows],
    )
    return plan.rows_of(ranks.rank)


def pack_own(
    rows: Sequence[TokenRow], packing: Sequence[Sequence[int]], ranks: Ranks
) -> list[PackedBatch]:
    """Return the rows packed as `own_packing` says, on this rank's device."""
    return [pack_rows([rows[i] for i in indices]).to(ranks.device) for indices in packing]


def rows_behind(num_rows: int, ranks: Ranks) -> int:
    """Return how many rows fewer than the busiest rank this one has."""
    most: int = max(ranks.gather(num_rows))
    return most - num_rows


def keep_pace(policy: PolicyModel, num_rows: int, ranks: Ranks) -> None:
    """Run `num_rows` forward and backward passes that train nothing.

    All ranks together gather a sharded layer, so each rank must run it as often as the busiest
    does. Call `rows_behind` before the first row, because that is a collective too.
    """
    for _ in range(num_rows):
        logprobs = policy(_idle_row().to(ranks.device)).logprobs
        if logprobs.requires_grad:
            logprobs.sum().backward()


@torch.no_grad()
def score_rows(
    policy: PolicyModel, rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int
) -> list[Tensor]:
    """Return log-probs float32 [M] of each row's tokens at its own temperature, on every rank.

    Each row is scored by one rank.
    """
    lengths = [len(row.token_ids) for row in rows]
    groups = [row.group_index for row in rows]
    plan = plan_ranks(lengths, max_tokens=max_tokens, num_ranks=ranks.size, groups=groups)
    own = plan.rows_of(ranks.rank)
    packed = [pack_rows([rows[i] for i in indices]).to(ranks.device) for indices in own]
    scores = [policy(row, temperature=row.temperature) for row in packed]
    keep_pace(policy, len(plan.ranks[ranks.rank]) - len(own), ranks)
    reshard(policy)
    values = torch.cat([torch.empty(0), *(score.logprobs.float().cpu() for score in scores)])
    by_row: dict[int, Tensor] = {}
    for rank, part in enumerate(ranks.gather_tensors(values)):
        order = [i for indices in plan.rows_of(rank) for i in indices]
        ends = [0, *accumulate(int(rows[i].response_mask.sum()) for i in order)]
        by_row |= {i: part[ends[k] : ends[k + 1]] for k, i in enumerate(order)}
    return [by_row[i] for i in range(len(rows))]


def _idle_row() -> PackedBatch:
    nothing = torch.zeros(2, dtype=torch.bool)
    return pack_rows([TokenRow(token_ids=torch.zeros(2).long(), response_mask=nothing)])
