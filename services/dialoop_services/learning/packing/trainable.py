"""Whether rows have what a loss reads, asked before any forward and without the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dialoop_services.learning.packing.rows import pack_rows
from dialoop_services.learning.training import loss_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_services.learning.loss.objective import Objective
    from dialoop_services.learning.packing.rows import TokenRow


def alike(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The rows without those values that only some of them have, for a row packs all or none.

    A loss that needs them says so of rows that had none: see `require_trainable`.
    """
    speaking = [row for row in rows if bool(row.response_mask.any())]
    partial: dict[str, Any] = {
        name: None
        for name in ("ref_logprobs", "advantages")
        if any(getattr(row, name) is None for row in speaking)
    }
    return [replace(row, **partial) for row in rows] if partial else list(rows)


@torch.no_grad()
def require_trainable(rows: Sequence[TokenRow], objective: Objective) -> None:
    """InvalidInput where rows lack what the loss reads (LOSS_INPUT_MISSING), or only some have it.

    The loss is a function of its inputs, so it is asked itself, about a policy of probability 1.
    """
    if not any(bool(row.response_mask.any()) for row in rows):
        return
    batch = pack_rows(rows)
    nothing = torch.zeros(batch.num_loss_tokens)
    if batch.proximal_logprobs is None and objective.needs_proximal:
        batch = replace(batch, proximal_logprobs=batch.scatter(nothing))
    objective(loss_inputs(batch, nothing, entropy=nothing))
