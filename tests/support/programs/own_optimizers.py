"""Optimisers as a user would write them, and mistakes that a user could make."""

from __future__ import annotations

from typing import Any

import torch


class Smooth(torch.optim.Optimizer):
    """Steps along a running mean of gradients, divided by a root of their mean square."""

    def __init__(self, parameters: Any, *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["num_steps"] = 0
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["num_steps"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.9).add_(p.grad**2, alpha=0.1)
                share = 1 - 0.9 ** state["num_steps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(
                    group["lr"]
                    * (state["mean"] / share)
                    / ((state["square"] / share).sqrt() + 1e-3)
                )


def momentum(parameters: Any, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return torch's own SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)


class Forgetful(Smooth):
    """Keeps something that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        """Take one step."""
        super().step()
        for state in self.state.values():
            state["object"] = object()


class Local(torch.optim.Optimizer):
    """Keeps this rank's part of a sharded parameter as if it were the whole."""

    def __init__(self, parameters: Any, *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for p in (p for group in self.param_groups for p in group["params"]):
            part = p.to_local() if hasattr(p, "to_local") else p
            self.state[p]["last"] = part.clone()


def without_the_first(parameters: Any, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Forget one of the parameters."""
    return torch.optim.SGD(parameters[1:], lr=lr)


def no_decay(parameters: Any, *, lr: float) -> torch.optim.Optimizer:
    """Take no weight decay."""
    return torch.optim.SGD(parameters, lr=lr)


def nothing(parameters: Any, *, lr: float, weight_decay: float) -> None:
    """Return no optimiser."""
