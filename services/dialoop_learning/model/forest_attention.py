"""Causal attention over a forest of sequences: each token is a query once, and keys stay in place.

The tokens of a subtree lie side by side (`dialoop_learning.rl.forest`). So all queries that attend
to a run of tokens that many sequences share are one slice, and its keys are another:

    places      0 1 2 3 4 | 5 6 7 | 8 9       a prompt 0-4 with two answers, 5-7 and 8-9
    block       keys 0-4, queries 5-9         no mask: all of them see the whole prompt
    buckets     0-4 | 5-7 | 8-9               causal, each by itself

Softmax over all keys of a query is put together from its parts, each with the logarithm of its sum
(Milakov and Gimelshein, arXiv:1805.02867). The backward pass of a part needs the output and the sum
of the whole instead of its own, and nothing else changes, as in ring attention (arXiv:2310.01889).

A short run is no block: its tokens are computed again in front of each run below it, whose results
are dropped, because that costs less than to put parts together. Without a block nothing here is
called. On CUDA there are no blocks: these kernels are the CPU's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dialoop_learning.rl.forest import Run

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_COPY, _MERGE, _CALL = 8, 48, 1000
"""Costs in those of a pair of a query and a key: of a copied token, of a query whose parts are put
together, and of a block."""


def copies_keys(device: torch.device) -> bool:
    """Return whether each sequence brings its own queries and keys, those of what it shares, too.

    Then memory bounds the tokens of a packed row with each of them counted for each sequence.
    """
    return device.type != "cpu"


class CausalPath(NamedTuple):
    """Runs of one path, computed together causally; only the last one's results may be new."""

    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Return its number of tokens."""
        return sum(run.end - run.start for run in self.runs)

    def places(self) -> Tensor:
        """Return the places of its tokens, int64 [length]."""
        return torch.cat([torch.arange(run.start, run.end) for run in self.runs])


def plan_paths(
    runs: Sequence[Run], *, with_blocks: bool
) -> tuple[list[CausalPath], tuple[Run, ...]]:
    """Return what is computed causally, and the runs whose keys are blocks for all that follows."""
    leaves = [run.start for run in runs if run.stop == run.end]
    paths: list[CausalPath] = []
    blocks: list[Run] = []
    path: list[tuple[Run, tuple[Run, ...]]] = []  # open runs, and what lies in front of those below
    for run in runs:
        while path and path[-1][0].stop <= run.start:
            path.pop()
        own_path = CausalPath((*(path[-1][1] if path else ()), run))
        is_leaf = run.stop == run.end
        num_below = bisect_left(leaves, run.stop) - bisect_left(leaves, run.end)
        is_block = with_blocks and not is_leaf and _is_worth(own_path, num_below)
        if is_leaf or is_block:
            paths.append(own_path)
        if is_block:
            blocks.append(run)
        path.append((run, own_path.runs[:-1] if is_block else own_path.runs))
    return paths, tuple(blocks)


def _is_worth(own_path: CausalPath, num_below: int) -> bool:
    """Return whether a run as a block costs less than in front of each path below it."""
    run = own_path.runs[-1]
    length = run.end - run.start
    pairs = own_path.length - length / 2
    block = _MERGE * (run.stop - run.end) + _CALL
    return (num_below - 1) * length * (pairs + _COPY) > block


class Part(NamedTuple):
    """The keys of a block that some queries see. visible: bool [queries, keys], None if all are."""

    keys: slice
    queries: slice | Tensor
    visible: Tensor | None


def part_of(run: Run, depths: Tensor, window: int | None) -> Part | None:
    """Return the part of a block inside the window; None where no query sees any of its keys.

    depths: int64 [K], the position of each token in its sequences.
    """
    keys, queries = slice(run.start, run.end), slice(run.end, run.stop)
    last = run.depth + run.end - run.start - 1
    if window is None or int(depths[queries].max()) - run.depth < window:
        return Part(keys, queries, None)
    seeing = run.end + (depths[queries] < last + window).nonzero().squeeze(-1)
    keys = slice(max(run.start, run.end + 1 - window), run.end)
    ago = depths[seeing, None] - depths[keys]
    return Part(keys, seeing, ago < window) if len(seeing) else None


def combine(
    parts: Sequence[tuple[slice | Tensor, Tensor, Tensor]], num: int, sinks: Tensor | None
) -> Tensor:
    """Return attention [num, H, D] from parts: places, outputs [n, H, D] and their sums [n, H].

    sinks: [H], a score beside the others whose value is zero.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0][1]
    every = torch.arange(num, device=parts[0][1].device)
    places = torch.cat([every[own] for own, _, _ in parts])
    outputs = torch.cat([own for _, own, _ in parts])
    sums = torch.cat([own for _, _, own in parts])
    greatest = sums.detach().new_full((num, sums.shape[1]), -torch.inf)
    greatest.scatter_reduce_(0, places[:, None].expand_as(sums), sums.detach(), "amax")
    if sinks is not None:
        greatest = torch.maximum(greatest, sinks.detach().to(sums.dtype))
    weights = (sums - greatest[places]).exp()
    total = torch.zeros_like(greatest).index_add(0, places, weights)
    if sinks is not None:
        total = total + (sinks.to(sums.dtype) - greatest).exp()
    weights = (weights / total[places]).to(outputs.dtype)
    whole = outputs.new_zeros(num, *outputs.shape[1:])
    return whole.index_add(0, places, outputs * weights[..., None])


class BucketRows(NamedTuple):
    """A bucket of paths.

    tokens: int64 [n, longest]. is_new: bool [n, longest], results that no other place has as well.
    visible: bool [n, 1, longest, longest], None where causal is all.
    """

    tokens: Tensor
    is_new: Tensor
    visible: Tensor | None


class ForestAttention(torch.autograd.Function):
    """Attention [K, H, D] of query [H, K, D], key and value [G, K, D] by the CPU's flash kernel."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes values one by one
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layouts: Sequence[BucketRows],
        restore: Tensor,
        parts: Sequence[Part],
        scale: float | None,
    ) -> Tensor:
        """Return the attention, and keep it with the sums for the backward pass."""
        found = [_attend(_rows(layout, query, key, value), layout, scale) for layout in layouts]
        outputs, sums = (
            torch.cat([x.transpose(1, 2).flatten(0, 1) for x in own]).index_select(0, restore)
            for own in zip(*found, strict=True)
        )
        outputs = outputs.to(sums.dtype)
        for part in parts:
            own, own_sums = (
                x[0].transpose(0, 1)
                for x in _flash(
                    query[None, :, part.queries],
                    *(_spread(x[None, :, part.keys], query) for x in (key, value)),
                    attn_mask=_bias(part.visible, query),
                    scale=scale,
                )
            )
            at = part.queries
            sums[at] = torch.logaddexp(sums[at], own_sums)
            weight = (own_sums - sums[at]).exp()[..., None]
            merged = outputs[at].lerp_(own.to(sums.dtype), weight)
            if isinstance(at, Tensor):  # then `merged` is a copy
                outputs[at] = merged
        outputs = outputs.to(query.dtype)
        ctx.save_for_backward(query, key, value, outputs, sums)
        ctx.plan = layouts, parts, scale
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value: the sums of those of each part."""
        *given, outputs, sums = ctx.saved_tensors
        query = given[0]
        layouts, parts, scale = ctx.plan
        grads = [torch.zeros_like(x) for x in given]
        for part in parts:
            whole = [x[part.queries].transpose(0, 1)[None] for x in (grad, outputs, sums)]
            rows = (
                query[None, :, part.queries],
                *(_spread(x[None, :, part.keys], query) for x in given[1:]),
            )
            visible = _bias(part.visible, query)
            own = _flash_backward(
                whole[0], *rows, *whole[1:], 0.0, False, attn_mask=visible, scale=scale
            )
            for total, x, at in zip(grads, own, (part.queries, part.keys, part.keys), strict=True):
                total[:, at] += _fold(x, total)[0]
        for layout in layouts:
            rows = _rows(layout, *given)
            # Results that were dropped have no gradient.
            flat, shape = layout.tokens.flatten(), layout.tokens.shape
            whole = [
                x.index_select(0, flat).view(*shape, *x.shape[1:]).transpose(1, 2)
                for x in (grad, outputs, sums)
            ]
            whole[0].mul_(layout.is_new[:, None, :, None])
            visible = _bias(layout.visible, query)
            own = _flash_backward(
                whole[0], *rows, *whole[1:], 0.0, visible is None, attn_mask=visible, scale=scale
            )
            for total, x in zip(grads, own, strict=True):
                total.index_add_(1, flat, _fold(x, total).transpose(0, 1).flatten(1, 2))
        return (*grads, None, None, None, None)


def _rows(layout: BucketRows, *packed: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value [., K, D] as batches [n, H, longest, D]."""
    taken = (
        x.index_select(1, layout.tokens.flatten()).view(len(x), *layout.tokens.shape, x.shape[-1])
        for x in packed
    )
    return tuple(_spread(x.transpose(0, 1), packed[0]) for x in taken)


def _attend(
    rows: tuple[Tensor, ...], layout: BucketRows, scale: float | None
) -> tuple[Tensor, Tensor]:
    visible = _bias(layout.visible, rows[0])
    found: tuple[Tensor, Tensor] = _flash(
        *rows, is_causal=visible is None, attn_mask=visible, scale=scale
    )
    return found


def _bias(visible: Tensor | None, like: Tensor) -> Tensor | None:
    """Return 0 where a query sees a key and -inf elsewhere, as the kernel adds it to scores."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -torch.inf)


def _spread(x: Tensor, query: Tensor) -> Tensor:
    """Return heads [n, G, L, D] once for each head of the query [H, K, D]."""
    return x.repeat_interleave(query.shape[0] // x.shape[1], dim=1)


def _fold(grad: Tensor, like: Tensor) -> Tensor:
    """Return gradients [n, H, L, D] summed over the heads that share one of `like` [G, K, D]."""
    if grad.shape[1] == len(like):
        return grad
    num, heads, *rest = grad.shape
    return grad.reshape(num, len(like), heads // len(like), *rest).sum(2)
