"""Sequences longer than a packed row: refused, left out, or cut at their end.

fitting(rows, max_tokens=1024, oversize="truncate")
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidInput

from dialoop_services.learning.packing.rows import OPTIONAL
from dialoop_services.rl.packing_plan import plan_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_services.config.tables import Oversize
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
            reason="SEQUENCE_TOO_LONG",
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
