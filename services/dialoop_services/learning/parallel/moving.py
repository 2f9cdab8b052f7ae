"""Moving what is trained between its device and the host."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from dialoop_services.learning.optim import GuardedOptimizer


def move_training(
    model: nn.Module, optimizers: Iterable[GuardedOptimizer], device: torch.device | str
) -> None:
    """Move parameters, buffers and optimiser state; nothing of them stays where they were.

    Parameters stay the same objects, so optimisers and tied weights go on with them.
    """
    target, left = torch.device(device), next(model.parameters()).device
    if target.type == left.type:
        return
    for parameter in model.parameters():  # a tied one comes once
        parameter.data = placed(parameter.data, target)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, placed(buffer, target))
    for guarded in optimizers:
        for optimizer in guarded.torch_optimizers:
            # Torch's own rules: moments follow their parameter, AdamW's step count stays on host.
            optimizer.load_state_dict(optimizer.state_dict())
    if left.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(left)
        torch.cuda.empty_cache()


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device."""
    return tensor.to(device)
