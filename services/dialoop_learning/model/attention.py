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
    kept            0 1   2 3         6      tokens computed: the second 5 8 is the first one's
    places          0 1   2 3   0 1   4      where each of the row's tokens finds its result

A token's hidden state depends only on the tokens before it in its sequence and on the experts that
are replayed for them, so sharing is exact where both are equal. The gradients of all sequences that
share a token add up in it. The eight answers of a GRPO group cost one prompt instead of eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

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
    """

    buckets: tuple[Tensor, ...]
    restore: Tensor
    longest: int
    varlen: VarlenPlan | None = None


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
    lengths: tuple[int, ...],
    *,
    shared: SharedPrefixes | None = None,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan buckets of sequences so that at most a quarter of any row is padding.

    Sequences that share a beginning read its keys and values from the same computed tokens.
    """
    starts = [0, *accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if not buckets or lengths[i] < (1 - _MOST_PADDING) * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(i)
    result_places = torch.empty(starts[-1], dtype=torch.int64)
    layouts, offset = [], 0
    for bucket in buckets:
        width = lengths[bucket[0]]
        first = torch.tensor([starts[i] for i in bucket])[:, None]
        size = torch.tensor([lengths[i] for i in bucket])[:, None]
        steps = torch.arange(width)
        real = steps < size
        layout = first + torch.minimum(steps, size - 1)
        result_places[layout[real]] = offset + real.flatten().nonzero().squeeze(-1)
        offset += layout.numel()
        layouts.append((layout if shared is None else shared.places[layout]).to(device))
    restore = result_places if shared is None else result_places[shared.kept]
    return AttentionPlan(
        buckets=tuple(layouts),
        restore=restore.to(device),
        longest=max(lengths, default=0),
        varlen=_plan_varlen(starts, shared, device)
        if torch.device(device).type == "cuda"
        else None,
    )


def _plan_varlen(
    starts: list[int], shared: SharedPrefixes | None, device: torch.device | str
) -> VarlenPlan:
    tokens = kept = torch.arange(starts[-1])
    if shared is not None:
        tokens, kept = shared.places, shared.kept
    return VarlenPlan(
        tokens=tokens.to(device),
        kept=kept.to(device),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
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
    plain = softcap is None and sinks is None
    # Under autocast values are in half precision, but rotated queries and keys are not.
    if plain and plan.varlen is not None and takes_varlen(value.device, value.dtype):
        return varlen_attention(query, key, value, plan, scale=scale, window=window), None
    lay_out: Callable[..., tuple[Tensor, ...]] = _LayOut.apply
    results = []
    for rows in zip(*(lay_out(x, plan.buckets) for x in (query, key, value)), strict=True):
        if plain:
            out = _bucket_attention(*rows, scale=scale, window=window)
        else:
            out = _scored_attention(*rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
        results.append(out.transpose(1, 2).flatten(0, 1))
    packed = torch.cat(results) if len(results) > 1 else results[0]
    return packed.index_select(0, plan.restore)[None], None


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


def _scored_attention(  # noqa: PLR0913 - what attention takes, and three ways to alter it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return causal attention [n, H, L, D] with all scores in memory.

    softcap: scores s become softcap tanh(s / softcap), as in Gemma 2 (arXiv:2408.00118, 2). sinks:
    [H], a score beside the others whose value is zero, as in gpt-oss (arXiv:2508.10925, 2).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Rotated queries and keys may be wider than the values under autocast.
    scores = (query @ key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(query.shape[2], window, query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, beside], dim=-1)
    probs = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return probs[..., : key.shape[2]] @ value


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [L, L]: whether the row's token attends to the column's."""
    steps = torch.arange(length, device=device)
    ago = steps[:, None] - steps
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


def _require_plan(query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> AttentionPlan:
    plan: AttentionPlan | None = kwargs.get("attention_plan")
    if plan is None or query.shape[0] != 1 or query.shape[2] != len(plan.restore):
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
