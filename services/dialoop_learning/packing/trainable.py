"""Rows that a train step can take: short enough, with the same values, and what the loss reads.

These checks need no policy and run before any forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_learning.packing.rows import OPTIONAL, pack_rows
from dialoop_learning.rl.packing_plan import plan_rows
from dialoop_learning.training import loss_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_learning.loss.facts import Oversize
    from dialoop_learning.loss.objective import Objective
    from dialoop_learning.packing.rows import TokenRow


def fit_rows(rows: Sequence[TokenRow], *, max_tokens: int, oversize: Oversize) -> list[TokenRow]:
    """Return rows of at most `max_tokens` tokens.

    A longer row raises InvalidInput (SEQUENCE_TOO_LONG) or, as `oversize` says, is dropped or
    truncated. Truncation changes no token that stays, because a token depends only on earlier ones.
    A truncated row without a token left to train is dropped. Raises InvalidInput
    (SEQUENCE_TOO_LONG) as well when no row is left.
    """
    lengths = [len(row.token_ids) for row in rows]
    if oversize == "error":
        plan_rows(lengths, max_tokens=max_tokens)
        return list(rows)
    if oversize == "truncate":
        cut = (truncate(row, max_tokens) for row in rows)
        kept = [row for row in cut if bool(row.response_mask.any())]
    else:
        kept = [row for row in rows if len(row.token_ids) <= max_tokens]
    if rows and not kept:
        raise InvalidInput(
            f"None of {len(rows)} sequences can be trained in rows of {max_tokens} tokens; the "
            f"longest has {max(lengths)}.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the episodes.",
        )
    return kept


def truncate(row: TokenRow, max_tokens: int) -> TokenRow:
    """Return the row's first `max_tokens` tokens, with their values."""
    if len(row.token_ids) <= max_tokens:
        return row
    mask = row.response_mask[:max_tokens]
    count = int(mask.sum())
    present = {name: values for name in OPTIONAL if (values := getattr(row, name)) is not None}
    cut: dict[str, Any] = {name: values[:count] for name, values in present.items()}
    if row.routed_experts is not None:
        cut["routed_experts"] = row.routed_experts[:max_tokens]
    return replace(row, token_ids=row.token_ids[:max_tokens], response_mask=mask, **cut)


def keep_common_values(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows without the values that only some have: a packed row holds all or none.

    If the loss needs these values, `require_trainable` raises.
    """
    with_response = [row for row in rows if bool(row.response_mask.any())]
    partial: dict[str, Any] = {
        name: None
        for name in ("ref_logprobs", "advantages")
        if any(getattr(row, name) is None for row in with_response)
    }
    return [replace(row, **partial) for row in rows] if partial else list(rows)


@torch.no_grad()
def require_trainable(rows: Sequence[TokenRow], objective: Objective) -> None:
    """Raise InvalidInput where rows lack what the loss reads (LOSS_INPUT_MISSING), or some do.

    It calls the loss itself, with log-probs of 0, because only the loss knows what it reads.
    """
    if not any(bool(row.response_mask.any()) for row in rows):
        return
    batch = pack_rows(rows)
    nothing = torch.zeros(batch.num_loss_tokens)
    if batch.proximal_logprobs is None and objective.needs_proximal:
        batch = replace(batch, proximal_logprobs=batch.scatter(nothing))
    objective(loss_inputs(batch, nothing, entropy=nothing))
