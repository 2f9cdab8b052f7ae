"""One sequence on several ranks: each computes a part of its tokens, and sees the keys of all.

Two ranks cut a row of 16 tokens into four chunks. Under a causal mask later tokens cost more, so
each rank computes one early and one late chunk:

    tokens      0-3  4-7  8-11  12-15
    rank         0    1     1     0

Layers see a rank's own tokens alone. In attention the ranks gather keys and values; the gradients
of these are summed back to the rank that made them. So the result is exact, and of a rank's memory
only keys and values, of one layer at a time, grow with the whole row. Log-probs are gathered at the
end, because a loss reads whole sequences; every rank computes it, and differentiates its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dialoop_learning.packing.rows import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This process's number among the `size` that compute a row together, and their group."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def share(self, batch: PackedBatch) -> ContextShare:
        """Return this rank's share of a row of one sequence, padded to a multiple of 2 size."""
        num_chunks, device = 2 * self.size, batch.packed_tokens.device
        length = batch.num_tokens // num_chunks
        assert (batch.num_sequences, length * num_chunks) == (1, batch.num_tokens)
        chunks = torch.arange(batch.num_tokens, device=device).view(num_chunks, length)
        early = torch.arange(self.size)
        by_rank = torch.stack([early, num_chunks - 1 - early], dim=1)
        places = torch.empty(batch.num_tokens, dtype=torch.int64, device=device)
        places[chunks[by_rank].flatten()] = torch.arange(batch.num_tokens, device=device)
        return ContextShare(
            context=self,
            starts=tuple(int(chunk) * length for chunk in by_rank[self.rank]),
            length=length,
            kept=chunks[by_rank[self.rank]].flatten(),
            places=places,
        )

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' values, without a gradient."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShare:
    """Which of a row's T tokens this rank computes: two chunks of `length` tokens.

    starts: where they begin in the row. kept: int64 [2 length], their positions. places: int64 [T],
    where in all ranks' tokens, one rank's after another's, each of the row's is.
    """

    context: Context
    starts: tuple[int, ...]
    length: int
    kept: Tensor
    places: Tensor

    def owners(self, positions: Tensor) -> Tensor:
        """Return which rank computes the tokens at these positions."""
        return self.places[positions] // len(self.kept)

    def own_places(self, positions: Tensor) -> Tensor:
        """Return where among this rank's tokens those at these positions are, all of them its."""
        return self.places[positions] - self.context.rank * len(self.kept)

    def of_all(self, own: Tensor) -> Tensor:
        """Return keys or values [1, K, T, D] of the whole row from [1, K, n, D] of this rank."""
        gather: Callable[..., Tensor] = _GatherTokens.apply
        return gather(own, self.context.group, self.places)

    def chunks(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each chunk's queries of [1, H, n, D], and keys and values that they see."""
        for number, start in enumerate(self.starts):
            own = query[:, :, number * self.length : (number + 1) * self.length]
            first = 0 if window is None else max(0, start + 1 - window)
            seen = slice(first, start + self.length)
            yield own, key[:, :, seen], value[:, :, seen]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens this rank computes."""
        return len(self.kept)

    def gather_scores(self, own: Tensor, owners: Tensor) -> Tensor:
        """Return the scores [M] of all trained tokens from each rank's own; owners: int64 [M]."""
        gather: Callable[..., Tensor] = _GatherScores.apply
        return gather(own, self.context, owners)


class _GatherTokens(torch.autograd.Function):
    """[1, K, n, D] of each rank as [1, K, T, D] in the order of the row."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, places: Tensor) -> Tensor:
        ctx.group, ctx.places, ctx.shape = group, places, own.shape
        rows = own[0].transpose(0, 1).contiguous()  # [n, K, D]
        every = rows.new_empty(len(places), *rows.shape[1:])
        dist.all_gather_single(every, rows, group=group)
        return every.index_select(0, places).transpose(0, 1)[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows = grad[0].transpose(0, 1)
        every = torch.empty_like(rows, memory_format=torch.contiguous_format)
        every.index_copy_(0, ctx.places, rows)
        own = every.new_empty(ctx.shape[2], *every.shape[1:])
        dist.reduce_scatter_single(own, every, group=ctx.group)
        return own.transpose(0, 1)[None], None, None


class _GatherScores(torch.autograd.Function):
    """[m] of each rank as [M]. All ranks compute one loss of it, so each keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Context, owners: Tensor) -> Tensor:
        counts = torch.bincount(owners, minlength=context.size).tolist()
        padded = torch.nn.functional.pad(own, (0, max(counts) - len(own)))
        every = padded.new_empty(context.size, len(padded))
        dist.all_gather_single(every.view(-1), padded, group=context.group)
        whole = own.new_empty(len(owners))
        for rank, count in enumerate(counts):
            whole[owners == rank] = every[rank, :count]
        ctx.own = owners == context.rank
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own], None, None
