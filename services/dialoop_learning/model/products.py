"""Float32 matrix products on a CPU by the library that is faster on its processor.

torch uses MKL for products in float32, and on an AMD processor MKL leaves AVX-512 unused: oneDNN,
which torch ships too, was 2.2 times as fast there (one core, 240 against 108 Gflop/s). Without
AVX-512 there is nothing to gain: on an AMD EPYC of family 25, model 1, oneDNN took 4 to 14 % more
CPU time for the shapes of a train step. On an Intel processor a train step with oneDNN took 19 %
longer. Both keep torch's own products. The processor decides, not a measurement at start: a
restarted trainer must repeat its steps bit for bit. The results differ only by the rounding of
another order of sums. Everything that is not float32 stays with torch. So do gradients of weights:
oneDNN first copies both of their factors, which lie transposed. On an EPYC of family 25, model 17,
that left 74 to 179 Gflop/s of MKL's 170 to 205 (two cores, shapes of a train step).

oneDNN caches what it prepares for each of 1024 shapes, with a buffer of the output's size. Packed
rows have another length in nearly every update, so the cache would grow to gigabytes. Importing
this module before the process's first oneDNN operation bounds both of its caches.

    with linear_products(device):
        model(hidden)               # every torch.nn.functional.linear in it, and its gradients
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

# The libraries read these at their first use. 32 is enough for the layers of one row.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "32")


def faster_library(machine: str, vendor: str, flags: Collection[str]) -> Literal["oneDNN", "torch"]:
    """Return whose float32 products are faster; vendor and flags as in /proc/cpuinfo."""
    leaves_some_unused = (machine, vendor) == ("x86_64", "AuthenticAMD") and "avx512f" in flags
    return "oneDNN" if leaves_some_unused else "torch"


def _processor() -> tuple[str, Collection[str]]:
    """Return vendor_id and flags of Linux's /proc/cpuinfo; "" and none where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "", ()
    facts = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    return facts.get("vendor_id", ""), facts.get("flags", "").split()


_IS_BUILT_IN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_AVAILABLE = _IS_BUILT_IN and faster_library(platform.machine(), *_processor()) == "oneDNN"


def library_of(device: torch.device) -> Literal["oneDNN", "torch"]:
    """Return whose float32 products the device's linear layers use, but for weights' gradients."""
    return "oneDNN" if _AVAILABLE and device.type == "cpu" else "torch"


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [M, K] @ right [K, N] by the faster library, without gradients.

    A left factor that is not contiguous, as a transposed one, is torch's: oneDNN would copy it.
    """
    if not (left.is_contiguous() and _is_for_onednn(left, right)):
        return left @ right
    return _onednn(left, right.T, None)


def linear_products(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the faster library runs a CPU's linear layers."""
    return OneDnnLinear() if device.type == "cpu" else nullcontext()


class OneDnnLinear(TorchFunctionMode):
    """A context in which oneDNN runs float32 linear layers on a CPU, forward and backward.

    Gradients of their weights stay torch's.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; torch calls this for every function inside the context."""
        if func is linear and not kwargs and _is_for_onednn(*args[:2]):
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


def _onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., K] @ weight.T + bias, weight [N, K], bias [N] or none."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    return bool(
        _AVAILABLE
        and left.dtype is right.dtype is torch.float32
        and left.is_cpu
        and right.is_cpu
        and left.numel() > 0
        and right.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )
