"""How evenly a mixture of experts uses its experts: the auxiliary loss that holds it to that.

`watch_routers` notes what the routers of a forward pass chose, and `balance_of` makes one number of
it: k, the experts of a token, where all are used alike.

Source: Switch Transformer (arXiv 2101.03961), equations 4 to 6, over all layers together as in
transformers' `load_balancing_loss_func`. The experts counted are those that the router chose, also
where it chooses by groups or with a bias.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

_ROUTER = "topkrouter"  # the end of the names of transformers' classes, in small letters
_NUM_OUTPUTS = 3


class Routed(NamedTuple):
    """What one layer's router said: logits [T, E], and the experts it chose, int64 [T, k]."""

    logits: Tensor
    experts: Tensor


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model's layers, in order; none where it has no experts."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith(_ROUTER)]


@contextmanager
def watch_routers(routers: Sequence[nn.Module]) -> Iterator[list[Routed]]:
    """Yield a list that gets what each router says while the block runs."""
    routed: list[Routed] = []

    def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, tuple) and len(outputs) == _NUM_OUTPUTS:
            routed.append(Routed(outputs[0], outputs[2]))

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield routed
    finally:
        for handle in handles:
            handle.remove()


def balance_of(routed: Sequence[Routed]) -> Tensor:
    """Return E times the sum over experts of their share of tokens times their mean probability.

    A token counts once for each of its k experts. The shares carry no gradient.
    """
    num_experts = routed[0].logits.shape[-1]
    counts = torch.zeros(num_experts, device=routed[0].logits.device)
    chances = torch.zeros_like(counts)
    num_rows = 0
    for logits, experts in routed:
        counts = counts + torch.bincount(experts.reshape(-1), minlength=num_experts)
        chances = chances + logits.float().softmax(-1).sum(0)
        num_rows += logits.shape[0]
    return num_experts * (counts / num_rows * (chances / num_rows)).sum()
