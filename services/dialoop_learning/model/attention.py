"""Causal attention inside each sequence of a packed row, for any transformers model.

The model's linear layers see the packed row. Attention is one SDPA call per bucket of sequences of
similar length. A bucket is a batch of its sequences, padded on the right. Under a causal mask no
real token attends to its right, so the padding needs no mask and changes nothing.

With 64 sequences of about 30 tokens in the demo's model this took two thirds of the time of one
call per sequence and a third of that of one dense block mask (one CPU core, forward and backward).

On a CUDA device and in half precision all sequences go through one call of torch's varlen flash
attention instead (`takes_varlen`). That kernel does not compute float32, which goes through SDPA.

A sliding window is a mask in SDPA, only in buckets that are longer than it. No kernel here has soft
caps or sinks: layers with them compute their scores in full, [n, heads, longest, longest] for a
bucket, as transformers' own eager attention does.

Beginnings that sequences have in common are computed once (`share_prefixes`). Two answers to one
prompt, and what a causal model has to compute for them:

    packed_tokens   5 8 | 9 1 . 5 8 | 4      the row, as losses see it
    kept            4 5 6 2 3                tokens computed: the first 5 8 is the second one's
    places          0 1   3 4   0 1   2      where each of the row's tokens finds its result

A token's hidden state depends only on the tokens before it in its sequence and on the experts that
are replayed for them, so sharing is exact where both are equal. The gradients of all sequences that
share a token add up in it. The eight answers of a GRPO group cost one prompt instead of eight.

Where several ranks compute one sequence (`dialoop_learning.model.context_parallel`), it is one SDPA
call for each chunk of this rank, over the keys up to its end.

What attends to a long shared beginning is one block of a forest on a CPU, which
`dialoop_learning.model.forest_attention` computes. In CUDA's half precision each sequence brings
its own queries and keys: blocks there need kernels that nobody has tried here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dialoop_learning.model.context_parallel import ContextShare
from dialoop_learning.model.forest_attention import (
    BucketRows,
    ForestAttention,
    Part,
    combine,
    copies_keys,
    part_of,
    plan_paths,
)
from dialoop_learning.rl.forest import Run, number_pairs, plant

PACKED_ATTENTION = "dialoop_packed"
"""The `attn_implementation` under which transformers finds `packed_attention`."""

_TAKES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 has it not yet
_MOST_PADDING = 0.25
_ALTERING = ("position_bias", "cache")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """The layout of a packed row for attention, made once per batch.

    buckets: per bucket the computed tokens int64 [n, longest]; padding repeats a real one.
    restore: int64 [K], the place of each computed token's result in the concatenated results.
    blocks: runs whose keys all that follows them sees beside its bucket's. depths: int64 [K], the
    position of each computed token in its sequences.
    """

    buckets: tuple[Tensor, ...]
    restore: Tensor
    depths: Tensor
    longest: int
    blocks: tuple[Run, ...] = ()
    varlen: VarlenPlan | None = None
    _inside: dict[int | None, tuple[list[BucketRows], list[Part]]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Return K: how many tokens are computed."""
        return len(self.restore)

    def inside(self, window: int | None) -> tuple[list[BucketRows], list[Part]]:
        """Return what is computed beside blocks, and the blocks, as a window of a layer cuts them.

        The layers of a model have one or two windows, so both are kept.
        """
        if window not in self._inside:
            total = sum(bucket.numel() for bucket in self.buckets)
            is_new = torch.zeros(total, dtype=torch.bool, device=self.restore.device)
            is_new[self.restore] = True
            new = torch.split(is_new, [bucket.numel() for bucket in self.buckets])
            layouts = [
                BucketRows(bucket, own.view(bucket.shape), self._mask(bucket, window))
                for bucket, own in zip(self.buckets, new, strict=True)
            ]
            parts = (part_of(block, self.depths, window) for block in self.blocks)
            self._inside[window] = layouts, [part for part in parts if part is not None]
        return self._inside[window]

    def _mask(self, bucket: Tensor, window: int | None) -> Tensor | None:
        """Return bool [n, 1, L, L], or None where causal is all that a bucket's tokens see.

        Between two tokens of a bucket may lie a block, which counts for the window.
        """
        depths = self.depths[bucket]
        if window is None or int((depths[:, -1] - depths[:, 0]).max()) < window:
            return None
        near = depths[:, :, None] - depths[:, None, :] < window
        return near.tril()[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenPlan:
    """The same layout for flash attention over all sequences at once.

    tokens: int64 [T], the computed token at each place. kept: int64 [K], the place from which each
    computed token is read back. cu_seqlens: int32 [N + 1].
    """

    tokens: Tensor
    kept: Tensor
    cu_seqlens: Tensor


def plan_attention(
    shared: SharedPrefixes, lengths: tuple[int, ...], *, device: torch.device | str = "cpu"
) -> AttentionPlan:
    """Plan buckets of runs so that at most a quarter of any row is padding.

    lengths: of the row's sequences. Runs of a forest are computed behind the beginnings that they
    share with others, unless these are blocks.
    """
    device = torch.device(device)
    paths, blocks = plan_paths(shared.runs, with_blocks=not copies_keys(device))
    paths.sort(key=lambda own_path: -own_path.length)
    buckets: list[list[Tensor]] = []
    for tokens in (own_path.places() for own_path in paths):
        if not buckets or len(tokens) < (1 - _MOST_PADDING) * len(buckets[-1][0]):
            buckets.append([])
        buckets[-1].append(tokens)
    restore = torch.empty(len(shared.kept), dtype=torch.int64)
    layouts, offset = [], 0
    for bucket in buckets:
        size = torch.tensor([len(tokens) for tokens in bucket])[:, None]
        steps = torch.arange(len(bucket[0]))
        real = steps < size
        layout = torch.nn.utils.rnn.pad_sequence(bucket, batch_first=True)
        layout = layout.gather(1, torch.minimum(steps, size - 1))
        restore[layout[real]] = offset + real.flatten().nonzero().squeeze(-1)
        offset += layout.numel()
        layouts.append(layout.to(device))
    depths = [torch.arange(run.end - run.start) + run.depth for run in shared.runs]
    return AttentionPlan(
        buckets=tuple(layouts),
        restore=restore.to(device),
        longest=max(lengths, default=0),
        varlen=_plan_varlen(lengths, shared, device) if device.type == "cuda" else None,
        blocks=blocks,
        depths=torch.cat(depths).to(device),
    )


def _plan_varlen(
    lengths: tuple[int, ...], shared: SharedPrefixes, device: torch.device
) -> VarlenPlan:
    return VarlenPlan(
        tokens=shared.places.to(device),
        kept=shared.kept.to(device),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
    )


def takes_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a varlen kernel with a backward: on CUDA in half precision."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: query [1, H, T, D], key and value [1, K, T, D].

    Returns [1, T, H, D]. Needs `attention_plan` among the model's keyword arguments, and follows
    `sliding_window`, `softcap` and `s_aux` (sinks). Raises Unsupported for what it cannot do
    exactly, such as masks.
    """
    plan = _require_plan(query, attention_mask, kwargs)
    scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(plan, ContextShare):
        whole = (query.to(value.dtype), plan.of_all(key.to(value.dtype)), plan.of_all(value))
        chunks = [
            _chunk_attention(*own, scale=scale, window=window, softcap=softcap, sinks=sinks)
            for own in plan.chunks(*whole, window=window)
        ]
        return torch.cat(chunks)[None], None
    plain = softcap is None and sinks is None
    # Under autocast values are in half precision, but rotated queries and keys are not.
    if plain and plan.varlen is not None and takes_varlen(value.device, value.dtype):
        return varlen_attention(query, key, value, plan, scale=scale, window=window), None
    if plain and not plan.blocks:
        lay_out: Callable[..., tuple[Tensor, ...]] = _LayOut.apply
        results = [
            _bucket_attention(*rows, scale=scale, window=window).transpose(1, 2).flatten(0, 1)
            for rows in zip(*(lay_out(x, plan.buckets) for x in (query, key, value)), strict=True)
        ]
        packed = torch.cat(results) if len(results) > 1 else results[0]
        return packed.index_select(0, plan.restore)[None], None
    if plain and query.shape[-1] == value.shape[-1]:
        forest: Callable[..., Tensor] = ForestAttention.apply
        layouts, parts = plan.inside(window)
        heads = (x[0].to(value.dtype) for x in (query, key, value))
        return forest(*heads, layouts, plan.restore, parts, scale)[None], None
    out = _scored_attention(
        query, key, value, plan, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    return out[None], None


def varlen_attention(  # noqa: PLR0913 - what a kernel takes, and the kernel
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None,
    window: int | None = None,
    kernel: Callable[..., Any] = varlen_attn,
    takes_groups: bool = _TAKES_GROUPS,
) -> Tensor:
    """Return attention [1, T, H, D] by one call of `kernel`, in the dtype of `value`.

    `kernel` is torch's varlen_attn or has its signature. With a window each token attends to that
    many tokens, of which it is the last. A kernel that does not take grouped heads gets the keys
    and values of each head.
    """
    assert plan.varlen is not None
    rows = [
        x[0].to(value.dtype).transpose(0, 1).index_select(0, plan.varlen.tokens)
        for x in (query, key, value)
    ]
    ends, longest = plan.varlen.cu_seqlens, plan.longest
    num_shared = query.shape[1] // key.shape[1]
    options = {"enable_gqa": num_shared > 1} if takes_groups else {}
    if num_shared > 1 and not takes_groups:
        rows[1:] = [x.repeat_interleave(num_shared, dim=1) for x in rows[1:]]
    out: Tensor = kernel(
        *rows,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # causal
        **options,
    )
    return out.index_select(0, plan.varlen.kept)[None]


def _bucket_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Return causal attention [n, H, L, D] by SDPA; query [n, H, L, D], key and value [n, K, L, D].

    It needs a mask only where the window is shorter than the bucket.
    """
    length = query.shape[2]
    windowed = window is not None and window < length
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_visible(length, window, query.device) if windowed else None,
        is_causal=not windowed,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _chunk_attention(  # noqa: PLR0913 - what attention takes, and three ways to alter it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [n, H, D] of the last n of m tokens: [1, H, n, D] over [1, K, m, D]."""
    num, length = query.shape[2], key.shape[2]
    if softcap is None and sinks is None:
        visible: Any = causal_lower_right(num, length)
        if window is not None:
            visible = _visible(length, window, query.device, num=num)
        out = scaled_dot_product_attention(
            query, key, value, visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    rows = [query, *(x.repeat_interleave(groups, 1) for x in (key, value))]
    visible = _visible(length, window, query.device, num=num)
    outputs, sums = _score(rows, visible, scale=scale, softcap=softcap)
    return combine([(slice(None), outputs, sums)], num, sinks)


def _scored_attention(  # noqa: PLR0913 - what attention takes, and three ways to alter it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return causal attention [K, H, D] with all scores in memory; query [1, H, K, D].

    softcap: scores s become softcap tanh(s / softcap), as in Gemma 2 (arXiv:2408.00118, 2). sinks:
    [H], a score beside the others whose value is zero, as in gpt-oss (arXiv:2508.10925, 2).
    """
    groups = query.shape[1] // key.shape[1]
    packed = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    layouts, parts = plan.inside(window)
    lay_out: Callable[..., tuple[Tensor, ...]] = _LayOut.apply
    found = []
    for layout, *rows in zip(layouts, *(lay_out(x, plan.buckets) for x in packed), strict=True):
        visible = layout.visible
        if visible is None:
            visible = _visible(layout.tokens.shape[1], None, query.device)
        found.append(_score(rows, visible, scale=scale, softcap=softcap))
    outputs, sums = (
        torch.cat(own).index_select(0, plan.restore) for own in zip(*found, strict=True)
    )
    whole: list[tuple[slice | Tensor, Tensor, Tensor]] = [(slice(None), outputs, sums)]
    for part in parts:
        rows = [query[:, :, part.queries], *(x[:, :, part.keys] for x in packed[1:])]
        own = _score(rows, part.visible, scale=scale, softcap=softcap)
        whole.append((part.queries, *own))
    return combine(whole, len(plan.restore), sinks)


def _score(
    rows: Sequence[Tensor], visible: Tensor | None, *, scale: float | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return outputs [n L, H, D] and the logarithms [n L, H] of what softmax divides by."""
    query, key, value = rows
    # Rotated queries and keys may be wider than the values under autocast.
    scores = (query @ key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sums = scores.logsumexp(-1)
    outputs = (scores - sums[..., None]).exp().to(value.dtype) @ value
    return outputs.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1)


def _visible(
    length: int, window: int | None, device: torch.device, *, num: int | None = None
) -> Tensor:
    """Return bool [num, L] of the last num tokens: whether the row's attends to the column's."""
    steps = torch.arange(length, device=device)
    ago = steps[-(num or length) :, None] - steps
    return (ago >= 0) if window is None else (ago >= 0) & (ago < window)


class _LayOut(torch.autograd.Function):
    """[1, H, T, D] at the positions of each bucket, as batches of sequences [n, H, longest, D].

    Its gradient is summed in one tensor, where that of separate selections would be one each.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, buckets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ctx.buckets, ctx.shape = buckets, packed.shape
        heads, _, size = packed.shape[1:]
        return tuple(
            packed[0]
            .index_select(1, layout.flatten())
            .view(heads, *layout.shape, size)
            .transpose(0, 1)
            for layout in buckets
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for layout, grad in zip(ctx.buckets, grads, strict=True):
            total[0].index_add_(1, layout.flatten(), grad.transpose(0, 1).flatten(1, 2))
        return total, None


def _require_plan(
    query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> AttentionPlan | ContextShare:
    plan: AttentionPlan | ContextShare | None = kwargs.get("attention_plan")
    if plan is None or query.shape[0] != 1 or query.shape[2] != plan.num_tokens:
        raise Unsupported(
            "Packed attention needs one packed row and its attention_plan.",
            reason=Reason.ATTENTION_PLAN_MISSING,
            remedy="Call the model through dialoop_learning.model.policy.PolicyModel.",
        )
    altering = [name for name in _ALTERING if kwargs.get(name) is not None]
    if kwargs.get("dropout"):
        altering.append("dropout")
    if mask is not None:
        altering.append("attention_mask")
    if altering:
        raise Unsupported(
            f"Packed attention cannot do {', '.join(altering)}.",
            reason=Reason.ATTENTION_NOT_PLAIN,
            remedy="Use a model whose attention is causal, as those in docs/families.md.",
        )
    return plan


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """The K tokens of a packed row of T tokens that the model has to compute, as a forest has them.

    kept: int64 [K], positions in the row. places: int64 [T], each token's index among the K. runs:
    the forest's, of the K tokens.
    """

    kept: Tensor
    places: Tensor
    runs: tuple[Run, ...]


def share_prefixes(
    tokens: Tensor, lengths: tuple[int, ...], experts: Tensor | None = None
) -> SharedPrefixes:
    """Find the common beginnings of the row's N sequences; tokens int64 [T], T the sum of lengths.

    experts: [T, layers, k] that are replayed.
    """
    ids = number_pairs(tokens.cpu().numpy(), None if experts is None else experts.cpu().numpy())
    starts = [0, *accumulate(lengths)]
    forest = plant([ids[start:end] for start, end in pairwise(starts)])
    places = np.empty(starts[-1], dtype=np.int64)
    kept, num, before = [], 0, 0
    for index, common in zip(forest.order, forest.common, strict=True):
        start, end = starts[index] + common, starts[index + 1]
        places[starts[index] : start] = places[before : before + common]
        places[start:end] = np.arange(num, num + end - start)
        kept.append(np.arange(start, end))
        num, before = num + end - start, starts[index]
    return SharedPrefixes(
        kept=torch.from_numpy(np.concatenate(kept)),
        places=torch.from_numpy(places),
        runs=tuple(forest.runs()),
    )
