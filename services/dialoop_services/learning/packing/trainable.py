"""Rows that a train step can take: short enough, alike, and with what the loss reads.

All of it is asked before any forward and without the policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_services.learning.packing.rows import OPTIONAL, pack_rows
from dialoop_services.learning.training import loss_inputs
from dialoop_services.rl.packing_plan import plan_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_services.config.tables import Oversize
    from dialoop_services.learning.loss.objective import Objective
    from dialoop_services.learning.packing.rows import TokenRow


def fitting(rows: Sequence[TokenRow], *, max_tokens: int, oversize: Oversize) -> list[TokenRow]:
    """Rows of at most `max_tokens` tokens.

    A longer one raises InvalidInput (SEQUENCE_TOO_LONG) or, as `oversize` says, is dropped, or
    truncated: what comes after a token is nothing that the token depends on. One of which no
    token is left to train is dropped then. That nothing at all is left is an error, too.
    """
    lengths = [len(row.token_ids) for row in rows]
    if oversize == "error":
        plan_rows(lengths, max_tokens=max_tokens)
        return list(rows)
    if oversize == "truncate":
        cut = (truncated(row, max_tokens) for row in rows)
        kept = [row for row in cut if bool(row.response_mask.any())]
    else:
        kept = [row for row in rows if len(row.token_ids) <= max_tokens]
    if rows and not kept:
        raise InvalidInput(
            f"Nothing is left to train of {len(rows)} sequences, the longest of {max(lengths)} "
            f"tokens, in rows of {max_tokens}.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the episodes.",
        )
    return kept


def truncated(row: TokenRow, max_tokens: int) -> TokenRow:
    """The row's first `max_tokens` tokens, with what is known of them."""
    if len(row.token_ids) <= max_tokens:
        return row
    mask = row.response_mask[:max_tokens]
    count = int(mask.sum())
    known = {name: values for name in OPTIONAL if (values := getattr(row, name)) is not None}
    cut: dict[str, Any] = {name: values[:count] for name, values in known.items()}
    return replace(row, token_ids=row.token_ids[:max_tokens], response_mask=mask, **cut)


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
