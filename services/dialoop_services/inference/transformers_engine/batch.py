"""Rows that decode together: a left-padded key cache that rows join and leave between steps.

Two rows of 3 and 5 cached tokens (`.` is padding, hidden by the mask):

    . . a a a
    b b b b b
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dialoop_learning.model.experts import chosen_experts, watch_routers
from torch import nn
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import Cache

from dialoop_services.inference.transformers_engine.keys import RoomyLayer

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [B, heads, L, head_dim] each."""


class DecodingBatch:
    """The keys of the running rows; the caller keeps the rows, in the same order.

    routers: those whose choices `experts` gets. experts: int64 [n, L, layers, k] of what the last
    pass computed of its n rows, padding included; None without routers.
    """

    def __init__(self, model: Any, routers: Sequence[nn.Module] = ()) -> None:
        self._model = model
        self._routers = routers
        self.experts: torch.Tensor | None = None
        self._layers: list[RoomyLayer] = []
        self._mask = torch.empty(0, 0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._mask)

    def clear(self) -> None:
        """Drop all keys."""
        self._layers, self._mask = [], torch.empty(0, 0, dtype=torch.int64)

    def admit(
        self, rows: Sequence[Sequence[int]], which: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Compute the keys of new rows, append them; return next-token logits [n, V].

        `which` names the row that each of n new ones is: samples of one prompt are computed once.
        """
        device = self._model.device
        sizes = [len(row) for row in rows]
        width = max(sizes)
        # Indices are made on the host, so that no step waits for the device to tell a length.
        lasts, place = torch.unique(torch.tensor(sizes, device="cpu") - 1, return_inverse=True)
        lasts, place = lasts.to(device), place.to(device)
        copies = torch.tensor(range(len(rows)) if which is None else which, device=device)
        lengths = torch.tensor(sizes, device=device)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        # Padding stands on the right and attention is causal: no real token sees it.
        output = self._compute(
            ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=lasts
        )
        shift = torch.arange(width, device=device)[None, :] - (width - lengths)[:, None]
        index = shift.clamp_min(0)[:, None, :, None]
        layers = [
            (k.take_along_dim(index, dim=2)[copies], v.take_along_dim(index, dim=2)[copies])
            for k, v in [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        ]
        self._join(layers, (shift >= 0).long()[copies])
        if self.experts is not None:
            self.experts = self.experts[copies]
        logits: torch.Tensor = output.logits[torch.arange(len(rows), device=device), place]
        return logits[copies]

    def step(self, last_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Feed one token per row, at its position; return next-token logits [B, V]."""
        device = self._model.device
        self._mask = pad(self._mask, (0, 1), value=1)
        output = self._compute(
            torch.tensor(last_ids, device=device)[:, None],
            position_ids=torch.tensor(positions, device=device)[:, None],
            attention_mask=self._mask,
            past_key_values=Cache(layers=list(self._layers)),
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _compute(self, ids: torch.Tensor, **inputs: Any) -> Any:
        """Run the model over ids [n, L], and keep what its routers chose."""
        with watch_routers(self._routers) as routed:
            output = self._model(input_ids=ids, **inputs)
        if self._routers:
            experts = chosen_experts(routed)
            self.experts = experts.reshape(*ids.shape, *experts.shape[1:])
        return output

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> list[int]:
        """Keep these rows, drop the columns that are padding in all; return the rows' new order.

        The last rows close up the gaps, so that few are copied.
        """
        order = close_up(places)
        if len(order) == len(self):
            return order
        if not order:
            self.clear()
            return order
        mask = self._mask[order]
        first = int(mask.any(dim=0).int().argmax())
        self._mask = mask[:, first:]
        for layer in self._layers:
            layer.keep(order, first)
        return order

    def _join(self, layers: Layers, mask: torch.Tensor) -> None:
        width = max(self._mask.shape[1], mask.shape[1])
        if self._layers:
            self._mask = torch.cat([_widen(self._mask, width, 1), _widen(mask, width, 1)])
            running = [(layer.keys, layer.values) for layer in self._layers]
            layers = [
                (
                    torch.cat([_widen(old_keys, width, 2), _widen(keys, width, 2)]),
                    torch.cat([_widen(old_values, width, 2), _widen(values, width, 2)]),
                )
                for (old_keys, old_values), (keys, values) in zip(running, layers, strict=True)
            ]
        else:
            self._mask = mask
        self._layers = [RoomyLayer(keys, values) for keys, values in layers]


def close_up(kept: Sequence[int]) -> list[int]:
    """Return ascending places in an order that moves few: the last ones fill the gaps.

    [0, 2, 3, 5] -> [0, 5, 2, 3]
    """
    staying = {place for place in kept if place < len(kept)}
    moving = iter(place for place in kept if place >= len(kept))
    return [place if place in staying else next(moving) for place in range(len(kept))]


def _widen(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Return the tensor with zeros in front along `dim`."""
    missing = width - tensor.shape[dim]
    after = [0, 0] * (tensor.ndim - 1 - dim)
    return pad(tensor, [*after, missing, 0]) if missing else tensor
