"""The column `routed_experts`: which experts of each layer computed a token, as numbers.

    [L, layers, k] of uint8, or of uint16 from 256 experts on, a row for each token
    [[3, 7], [0, 5]]          one token: experts 3 and 7 of the first layer, 0 and 5 of the second
    [[255, 255], [255, 255]]  nobody computed it: the type's largest number stands for no record

The engine writes it, the queue checks its form, and the trainer checks it against its own model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Along, Column, Sequence
from numpy.typing import NDArray

COLUMN = "routed_experts"
DTYPES = (np.dtype("u1"), np.dtype("<u2"))
"""The types that the column may have, the smallest first."""
NO_EXPERT = -1
"""What stands for no record in `recorded_experts`."""
_NUM_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the routers of a model choose from: k of `num_experts` in each layer that has them."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest type that has a number left for no record."""
        small, large = DTYPES
        return small if self.num_experts <= np.iinfo(small).max else large


def experts_column(routing: Routing, computed: NDArray[Any] | None, num_tokens: int) -> Column:
    """Return the column of `num_tokens` tokens, of which the first were computed.

    computed: [N, layers, k]; rows beyond the tokens are left out, and tokens beyond its rows have
    no record.
    """
    shape = (num_tokens, routing.num_layers, routing.top_k)
    values = np.full(shape, np.iinfo(routing.dtype).max, routing.dtype)
    if computed is not None:
        count = min(num_tokens, len(computed))
        values[:count] = computed[:count]
    return Column(values=values, along=Along.TOKENS)


def has_form(column: Column) -> bool:
    """Return whether a column can be `routed_experts` of some model."""
    is_along = column.along is Along.TOKENS
    return is_along and column.values.dtype in DTYPES and column.values.ndim == _NUM_AXES


def recorded_experts(sequence: Sequence, routing: Routing | None) -> NDArray[np.int16] | None:
    """Return the experts int16 [L, layers, k] that a sequence records; None without the column.

    Raises InvalidInput where they cannot be those of a model with this routing; None: of a model
    without experts.
    """
    column = sequence.columns.get(COLUMN)
    return None if column is None else experts_of(column, routing)


def experts_of(column: Column, routing: Routing | None) -> NDArray[np.int16]:
    """Return the experts int16 [L, layers, k] of a column, as `recorded_experts` does."""
    values = column.values
    if not has_form(column):
        raise InvalidInput(
            f"{COLUMN} has {values.ndim} axes of {values.dtype}, along {column.along.name}.",
            reason=Reason.BAD_COLUMN,
            remedy="Give [L, layers, k] of uint8 or uint16, a row for each token.",
        )
    layers = (0, 0) if routing is None else (routing.num_layers, routing.top_k)
    if routing is None or values.shape[1:] != layers:
        raise InvalidInput(
            f"{COLUMN} is of {values.shape[1]} layers with {values.shape[2]} experts a token, and "
            f"the model has {layers[0]} with {layers[1]}.",
            reason=Reason.BAD_COLUMN,
            remedy="Play with the model that is trained, or set replay_routed_experts = false in "
            "[train].",
        )
    experts = values.astype(np.int16)  # the largest uint16 becomes -1
    experts[values == np.iinfo(values.dtype).max] = NO_EXPERT
    has_none = experts == NO_EXPERT
    ordered = np.sort(experts, axis=-1)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    is_wrong = (experts >= routing.num_experts) | (experts < NO_EXPERT)
    is_wrong |= (has_none.any(-1) & ~has_none.all(-1))[..., None]
    is_wrong |= (is_repeated & ~has_none.all(-1))[..., None]
    if is_wrong.any():
        token, layer = np.argwhere(is_wrong.any(-1))[0]
        raise InvalidInput(
            f"{COLUMN} has {values[token, layer].tolist()} for token {token} in layer {layer}, and "
            f"the model has {routing.num_experts} experts.",
            reason=Reason.OUT_OF_RANGE,
            remedy=f"Give {routing.top_k} different experts, or {np.iinfo(values.dtype).max} for "
            "each of them where there is no record.",
        )
    return experts
