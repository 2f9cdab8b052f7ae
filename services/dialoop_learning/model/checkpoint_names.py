"""Names of weights: those of a checkpoint's files, and those of the model that transformers makes.

They differ where transformers fuses what a checkpoint keeps apart: the experts of Qwen3-MoE and
DeepSeek are one tensor of a model, and three for each expert in its files. Engines and exports use
the checkpoint's names, so that every policy can be loaded where the first model could.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

_MAX_NAMED = 3


def to_checkpoint(
    causal_lm: Any, tensors: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Return a model's whole weights under `names`, those of its checkpoint; a tied head may lack.

    Raises Unsupported (MODEL_NOT_PUBLISHABLE) where transformers does not know how they were made.
    """
    if tensors.keys() <= set(names):
        return dict(tensors)
    named: dict[str, Tensor] = revert_weight_conversion(causal_lm, dict(tensors))
    unknown = sorted(named.keys() - set(names))
    if unknown:
        raise Unsupported(
            f"{len(unknown)} weights of this model are not in its checkpoint: "
            f"{', '.join(unknown[:_MAX_NAMED])}.",
            reason=Reason.MODEL_NOT_PUBLISHABLE,
            remedy="Save the checkpoint with save_pretrained of the installed transformers, or "
            'publish LoRA adapters alone: publish = "adapter" in [model.lora].',
        )
    return {name: tensor.contiguous() for name, tensor in named.items()}


def rows_in_checkpoint(causal_lm: Any, name: str, shape: Sequence[int]) -> dict[str, Tensor]:
    """Return which rows of a model's tensor each of the checkpoint's tensors holds, int64 [...].

    Rows are along the last dimension and counted over all others: those of an expert's part, where
    the model has all experts in one. Empty where transformers knows of no tensors of whole rows.
    """
    numbers = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
    twice = numbers.repeat_interleave(2, -1)  # a last dimension of 1 would be dropped
    parts: dict[str, Tensor] = revert_weight_conversion(causal_lm, {name: twice})
    rows = {other: part[..., 0] for other, part in parts.items() if part.shape[-1] == 2}
    is_whole = all(bool((parts[other][..., 1] == own).all()) for other, own in rows.items())
    return rows if is_whole and len(rows) == len(parts) and set(rows) != {name} else {}


def from_checkpoint(causal_lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under a checkpoint's names under those of the model.

    Where the two differ, transformers makes the model's tensors, so for a moment there is a second
    copy of the weights. Names that it does not know stay as they are.
    """
    own = causal_lm.state_dict().keys()
    if tensors.keys() <= own:
        return dict(tensors)
    dtype = next(iter(tensors.values())).dtype
    made = _plain_class(causal_lm).from_pretrained(
        None, config=causal_lm.config, state_dict=dict(tensors), dtype=dtype
    )
    made_tensors = made.state_dict()
    return {name: tensor for name, tensor in made_tensors.items() if name in own}


def _plain_class(causal_lm: Any) -> Any:
    """Return transformers' class of a model, also of one that FSDP has given a class of its own."""
    return next(
        kind for kind in type(causal_lm).__mro__ if kind.__module__.startswith("transformers.")
    )
