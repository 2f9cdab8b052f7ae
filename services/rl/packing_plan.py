"""Which sequences share a packed row: first-fit-decreasing, never splitting one.

plan_rows([5, 3, 4, 2], max_tokens=7).rows     # ((0, 3), (2, 1)): 5 + 2 and 4 + 3 tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dialoop.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

Oversize = Literal["error", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Rows of indices into the given lengths, and the indices that fit no row."""

    rows: tuple[tuple[int, ...], ...]
    dropped: tuple[int, ...] = ()


def plan_rows(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    oversize: Oversize = "error",
    names: Sequence[str] | None = None,
) -> PackingPlan:
    """Rows of at most `max_tokens` tokens; the same lengths always give the same plan.

    First-fit-decreasing needs at most 11/9 of the best number of rows, plus one (Johnson 1973).
    A longer sequence raises InvalidInput (SEQUENCE_TOO_LONG, naming it by `names` or its index)
    or, with oversize="drop", is listed in `dropped`.
    """
    fitting, dropped = _split_oversize(lengths, max_tokens)
    if dropped and oversize == "error":
        raise _too_long(dropped[0], lengths, max_tokens, names)
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(fitting, key=lambda i: (-lengths[i], i)):
        row = next((r for r, room in enumerate(free) if room >= lengths[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(max_tokens)
        rows[row].append(index)
        free[row] -= lengths[index]
    return PackingPlan(rows=tuple(map(tuple, rows)), dropped=tuple(dropped))


def _split_oversize(lengths: Sequence[int], max_tokens: int) -> tuple[list[int], list[int]]:
    empty = [i for i, length in enumerate(lengths) if length < 1]
    if empty:
        raise InvalidInput(
            f"Sequence {empty[0]} has {lengths[empty[0]]} tokens.",
            reason="EMPTY_SEQUENCE",
            remedy="Leave out sequences without tokens.",
        )
    fitting = [i for i, length in enumerate(lengths) if length <= max_tokens]
    return fitting, [i for i, length in enumerate(lengths) if length > max_tokens]


def _too_long(
    index: int, lengths: Sequence[int], max_tokens: int, names: Sequence[str] | None
) -> InvalidInput:
    name = names[index] if names is not None else str(index)
    return InvalidInput(
        f"Sequence {name} has {lengths[index]} tokens, more than the {max_tokens} of a row.",
        reason="SEQUENCE_TOO_LONG",
        remedy="Raise max_tokens, shorten the episodes, or set oversize to 'drop'.",
    )
