"""Trajectories as columns of tensors for a loop of your own: nested, or padded with their lengths.

    rows = token_columns(group.trajectories)      # one mapping of tensors [L] for each sequence
    nested = as_nested_tensor(rows)               # each column a jagged tensor [B, *]
    padded = as_padded_tensor(rows)               # each column [B, longest], and its lengths

`as_nested_tensor` and `as_padded_tensor` are torchrl's names, and take any rows of tensors. The
trainer packs its rows without padding instead (`dialoop_learning.packing.rows`); the loss
is the same number in all three forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop_learning.packing.rows import OPTIONAL, TokenRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dialoop.trajectory import Trajectory
    from torch import Tensor


def token_columns(trajectories: Iterable[Trajectory]) -> list[dict[str, Tensor]]:
    """Return the columns of each sequence, in the order of trajectories and their sequences.

    token_ids: int64 [L]. response_mask: bool [L], tokens that the policy wrote. temperature:
    float32 [1], at which they were sampled. inference_logprobs, ref_logprobs, advantages: float32
    [L], 0 off the response; only those that every sequence has. A loss multiplies the log-prob of
    the token at p, from the logits at p - 1, with the values at p.

    Raise InvalidSequence for a trajectory that was sampled greedily, or without a prompt.
    """
    rows = []
    for trajectory in trajectories:
        temperature = trajectory.sampling.temperature
        temperature = 1.0 if temperature is None else temperature
        rows += [TokenRow.from_sequence(s, temperature=temperature) for s in trajectory.sequences]
    names = [n for n in OPTIONAL if all(getattr(row, n) is not None for row in rows)]
    return [
        {
            "token_ids": row.token_ids,
            "response_mask": row.response_mask,
            "temperature": torch.tensor([row.temperature]),
            **{name: _on_tokens(row, getattr(row, name)) for name in names},
        }
        for row in rows
    ]


def as_nested_tensor(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return each column of rows as a jagged nested tensor [B, *], its rows at their lengths.

    Raise InvalidInput (RAGGED) where there is no row, or one has other columns than the first.
    """
    return {
        name: torch.nested.nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name in _columns_of(rows)
    }


def as_padded_tensor(
    rows: Sequence[Mapping[str, Tensor]], *, pad_value: float = 0.0
) -> dict[str, Tensor]:
    """Return each column of rows as one tensor [B, longest], padded on the right, and its lengths.

    The lengths of column `name` are int64 [B] under `name_lengths`: padding is never recognised
    by its value. Masks (bool) are padded with False, whatever `pad_value` is. Raise InvalidInput
    (RAGGED) where there is no row, or one has other columns than the first.
    """
    columns: dict[str, Tensor] = {}
    for name in _columns_of(rows):
        values = [row[name] for row in rows]
        columns[name] = torch.nn.utils.rnn.pad_sequence(
            values,
            batch_first=True,
            padding_value=0.0 if values[0].dtype == torch.bool else pad_value,
        )
        columns[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
    return columns


def _columns_of(rows: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Return the names of the columns, which all rows have."""
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise InvalidInput(
            f"The {len(rows)} rows have other columns than the first, or there is none.",
            reason=Reason.RAGGED,
            remedy="Give rows with the same columns, and one at least.",
        )
    return list(rows[0])


def _on_tokens(row: TokenRow, values: Tensor) -> Tensor:
    """Return a value of each of the M sampled tokens, float32 [L] with 0 elsewhere."""
    placed = torch.zeros(len(row.token_ids))
    placed[row.response_mask] = values.float()
    return placed
