"""LossInputs from plain numbers."""

import math
from typing import Any

import torch
from dialoop_learning.loss.losses import LossInputs


def inputs_of(
    policy: list[float],
    inference: list[float] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> LossInputs:
    """One sequence of trained tokens unless fields say otherwise; lists become tensors."""
    count = len(policy)
    defaults: dict[str, Any] = {
        "sequence_index": torch.zeros(count, dtype=torch.int64),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "num_tokens": count,
        "num_sequences": 1,
        "inference_logprobs": inference,
    }
    fields = {
        name: torch.tensor(value, dtype=dtype if isinstance(value[0], float) else None)
        if isinstance(value, list)
        else value
        for name, value in (defaults | fields).items()
    }
    logprobs = torch.tensor(policy, dtype=dtype, requires_grad=True)
    return LossInputs(policy_logprobs=logprobs, **fields)


def log(*probabilities: float) -> list[float]:
    """Their natural logarithms."""
    return [math.log(value) for value in probabilities]
