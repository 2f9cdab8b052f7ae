"""Float32 matrix products of a CPU by oneDNN, which torch ships but does not ask for them.

torch's own products in float32 are MKL's, which on an AMD processor leaves AVX-512 unused: oneDNN
was 2.2 times as fast there (one core, 240 against 108 Gflop/s). What they round differs by the
order of their sums alone. Everything that is not float32 on an x86 CPU stays with torch.

oneDNN keeps what it prepared for each shape, with a buffer of the output's size, for 1024 shapes;
packed rows have another length in nearly every update, so that would grow to gigabytes. Importing
this module, before the process's first oneDNN operation, bounds both of its caches.

    with linear_products(device):
        model(...)                  # every torch.nn.functional.linear in it, and its gradients
"""

from __future__ import annotations

import os
import platform
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

# Read by the libraries when they are first used. Enough for the layers of one row, which share it.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "32")

_AVAILABLE = platform.machine() in ("x86_64", "AMD64") and torch._C._has_mkldnn


def product(one: Tensor, other: Tensor) -> Tensor:
    """The product one @ other of [M, K] and [K, N], by the faster library; without gradients."""
    if not _is_taken(one, other):
        return one @ other
    return _onednn(one, other.T, None)


def linear_products(device: torch.device) -> AbstractContextManager[Any]:
    """Within it linear layers on a CPU are `OneDnnLinear`; other devices are left alone."""
    return OneDnnLinear() if device.type == "cpu" else nullcontext()


class OneDnnLinear(TorchFunctionMode):
    """Within it linear layers in float32 on a CPU, forward and backward, are oneDNN's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer for `func`, as torch asks of a mode."""
        if func is linear and not kwargs and _is_taken(*args[:2]):
            return _Linear.apply(*args)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """inputs [..., K] @ weight.T + bias, weight [N, K], bias [N] or none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _onednn(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        wants = ctx.needs_input_grad
        of_inputs = product(rows, weight).view_as(inputs) if wants[0] else None
        of_weight = product(rows.T, inputs.reshape(len(rows), -1)) if wants[1] else None
        of_bias = rows.sum(0) if len(wants) > 2 and wants[2] else None
        return (of_inputs, of_weight, of_bias)[: len(wants)]


def _onednn(one: Tensor, other: Tensor, bias: Tensor | None) -> Tensor:
    """The product one @ other.T + bias, of [..., K] and [N, K]."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(one, other, bias, "none", [], "")
    return found


def _is_taken(one: Tensor, other: Tensor) -> bool:
    return bool(
        _AVAILABLE
        and one.dtype is other.dtype is torch.float32
        and one.is_cpu
        and other.is_cpu
        and one.numel() > 0
        and other.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )
