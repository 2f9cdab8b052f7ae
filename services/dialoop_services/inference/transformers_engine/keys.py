"""Key cache and attention of decoding rows, without copies for each token or grouped head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

DECODING_ATTENTION = "dialoop_decoding"
"""The `attn_implementation` under which `decoding_attention` is known to transformers."""

_ROOM = 32


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, with free space for more tokens behind them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._rooms = _Room(keys), _Room(values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values; return all of them."""
        keys, values = self._rooms
        self.keys, self.values = keys.add(key_states), values.add(value_states)
        return self.keys, self.values

    def keep(self, indices: Sequence[int], first: int) -> None:
        """Make row i what row `indices[i]` was; drop the columns before `first`."""
        self.keys, self.values = (room.keep(indices, first) for room in self._rooms)


class _Room:
    """A tensor [B, heads, L, head_dim] inside a larger one, whose columns behind L are free."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._whole = tensor
        self._num_rows = len(tensor)
        self._begin, self._end = 0, tensor.shape[2]

    def add(self, new: torch.Tensor) -> torch.Tensor:
        end = self._end + new.shape[2]
        if end > self._whole.shape[2]:
            inside = self._inside()
            rows, heads, length, size = inside.shape
            self._whole = inside.new_empty(rows, heads, length + new.shape[2] + _ROOM, size)
            self._whole[:, :, :length] = inside
            self._begin, self._end, end = 0, length, length + new.shape[2]
        self._whole[: self._num_rows, :, self._end : end] = new
        self._end = end
        return self._inside()

    def keep(self, indices: Sequence[int], first: int) -> torch.Tensor:
        moved = [(to, place) for to, place in enumerate(indices) if to != place]
        if moved:
            inside = self._inside()
            inside[[to for to, _ in moved]] = inside[[place for _, place in moved]]
        self._num_rows = len(indices)
        self._begin += first
        return self._inside()

    def _inside(self) -> torch.Tensor:
        return self._whole[: self._num_rows, :, self._begin : self._end]


def decoding_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' SDPA; with one masked query token do not copy grouped keys.

    The query heads [B, H, 1, D] that share a key head stand as its queries: [B, K, H / K, D].
    SDPA leaves out the soft cap of scores, so a model with one attends without it.
    """
    if kwargs.get("softcap") is not None:
        capped = _capped_attention(
            query, key, value, attention_mask, kwargs["softcap"], kwargs.get("scaling")
        )
        return capped, None
    batch, heads, num_tokens, size = query.shape
    is_plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
    is_shared = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    if num_tokens != 1 or key.shape[1] == heads or not (is_plain and is_shared):
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return out
    grouped = scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], heads // key.shape[1], size),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return grouped.reshape(batch, 1, heads, value.shape[-1]), None


def _capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
    scale: float | None,
) -> torch.Tensor:
    """Attend with scores s bounded to softcap tanh(s / softcap) (Gemma 2, arXiv:2408.00118, 2).

    query [B, H, Q, D], key and value [B, K, L, D], mask bool [B, 1, Q, L] (None: causal). Return
    [B, Q, H, D].
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    copies = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = ones.tril(num_keys - num_queries)
    # Not -inf: a row of padding attends to nothing, and its softmax must stay a number.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(DECODING_ATTENTION, decoding_attention)
AttentionMaskInterface.register(DECODING_ATTENTION, sdpa_mask)
