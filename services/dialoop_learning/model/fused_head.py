"""The head as one fused kernel on a GPU: cut cross-entropy (arXiv 2411.09009), the extra `gpu`.

The kernel never writes logits to memory, neither in forward nor in backward. It computes in half
precision: products of bfloat16 are summed in float32, and so are gradients of the head where the
installed release can. By default the kernel leaves small gradients out (`filter_eps`); Dialoop
keeps all of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Literal, NoReturn

import torch
from dialoop.errors import InvalidConfig, Unsupported
from dialoop.reasons import Reason
from torch import Tensor

LogprobKernel = Literal["chunked", "cut"]
"""How log-probs are computed: in chunks on any device, or by the fused kernel on a GPU."""

_HALF = (torch.bfloat16, torch.float16)
_PRECISE = ("accum_e_fp32", "accum_c_fp32")
_CHUNKED = 'Set logprob_kernel = "chunked" in [train], which runs anywhere'


def cut_kernel(device: torch.device) -> Callable[..., Tensor]:
    """Return `cut_cross_entropy.linear_cross_entropy`.

    Raises InvalidConfig (NEEDS_CUDA) without a CUDA device, and (KERNEL_NOT_INSTALLED) without the
    package.
    """
    if device.type != "cuda":
        raise InvalidConfig(
            f"The log-prob kernel cut needs a CUDA device, and the model is on {device.type}.",
            reason=Reason.NEEDS_CUDA,
            remedy=f'{_CHUNKED}, or train with device = "cuda".',
        )
    try:
        module = importlib.import_module("cut_cross_entropy")
    except ImportError as error:
        raise InvalidConfig(
            "The log-prob kernel cut needs the package cut-cross-entropy.",
            reason=Reason.KERNEL_NOT_INSTALLED,
            remedy=f"pip install 'dialoop-services[trainer,gpu]'. Or: {_CHUNKED}.",
        ) from error
    kernel: Callable[..., Tensor] = module.linear_cross_entropy
    return kernel


def cut_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    kernel: Callable[..., Tensor],
) -> Tensor:
    """Return log-probs float32 [M]; arguments as in `token_logprobs`, hidden in half precision.

    scale: 1 / temperature, float32 [M] or [1], which multiplies the hidden states. `kernel` has the
    signature of `linear_cross_entropy` and takes a gradient for each token.
    """
    require_half(hidden.dtype)
    tempered = (
        hidden if len(scale) == 1 and float(scale) == 1.0 else _apply_temperature(hidden, scale)
    )
    if not len(targets):  # CUDA cannot launch a kernel without blocks
        return (tempered.sum() + weight.sum()).float() * torch.zeros(0, device=hidden.device)
    options = {name: True for name in _PRECISE if name in inspect.signature(kernel).parameters}
    # Some releases cast the head themselves, others expect the dtype of the hidden states.
    head = weight.to(hidden.dtype)
    nll = kernel(tempered, head, targets, reduction="none", filter_eps=None, **options)
    return -nll.float()


def require_half(dtype: torch.dtype) -> None:
    """Raise Unsupported (KERNEL_NEEDS_HALF_PRECISION) for a dtype other than half precision."""
    if dtype not in _HALF:
        raise Unsupported(
            f"The log-prob kernel cut computes in half precision, not in {dtype}.",
            reason=Reason.KERNEL_NEEDS_HALF_PRECISION,
            remedy=f'Set dtype or autocast to "bfloat16" in [train]. Or: {_CHUNKED}.',
        )


def require_plain_head(bias: Tensor | None, softcap: float | None) -> None:
    """Raise Unsupported (KERNEL_NEEDS_PLAIN_HEAD) for a head with a bias or soft-capped logits."""
    if bias is not None or softcap is not None:
        what = "a bias" if bias is not None else "soft-capped logits"
        raise Unsupported(
            f"The log-prob kernel cut cannot compute a head with {what}, as this model has.",
            reason=Reason.KERNEL_NEEDS_PLAIN_HEAD,
            remedy=f"{_CHUNKED} and computes it.",
        )


def refuse_entropy() -> NoReturn:
    """Raise Unsupported: the kernel never holds a distribution, so it cannot give the entropy."""
    raise Unsupported(
        "The log-prob kernel cut gives no entropy.",
        reason=Reason.KERNEL_WITHOUT_ENTROPY,
        remedy=f"Set entropy_coeff to 0. Or: {_CHUNKED} and computes it.",
    )


def _apply_temperature(hidden: Tensor, scale: Tensor) -> Tensor:
    return (hidden.float() * scale[:, None]).to(hidden.dtype)
