"""AdamW with warm-up and decay, gradient clipping, and no step on numbers that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Linear warm-up over `warmup_steps` to `learning_rate`, then (schedule "linear" or "cosine") down
    to `final_share` of it at `total_steps`. Without total_steps the rate stays.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    total_steps: int | None = None
    final_share: float = 0.1
    schedule: Literal["linear", "cosine"] = "linear"

    def learning_rate_at(self, step: int) -> float:
        """The rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.learning_rate
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * (1 - (1 - self.final_share) * progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one update did; grad_norm is the norm before clipping."""

    applied: bool
    grad_norm: float
    learning_rate: float


class GuardedOptimizer:
    """AdamW that clips, follows the schedule, and refuses a step that is not finite.

    num_steps counts applied updates (the schedule follows it), num_refused the others.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.num_steps = 0
        self.num_refused = 0

    def step(self, loss: float) -> StepReport:
        """Apply the gradients (already summed over rows and ranks), then clear them.

        `loss` is the value they belong to. Nothing changes when it or the norm is not finite.
        """
        grad_norm = self._clip()
        rate = self.settings.learning_rate_at(self.num_steps)
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.num_steps += 1
        else:
            self.num_refused += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(applied=applied, grad_norm=grad_norm, learning_rate=rate)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "num_refused": self.num_refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = int(state["num_steps"])
        self.num_refused = int(state["num_refused"])

    def _clip(self) -> float:
        norm: Any = clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        # Under FSDP2 the norm is a DTensor that still has to be summed over the ranks.
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
