"""The trace of one train step: every number between its rows and its weights, in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dialoop_learning.model.policy import PolicyModel
from dialoop_learning.optim import StepReport
from dialoop_learning.packing.rows import PackedBatch, TokenRow
from torch import Tensor

from dialoop_services.trainer.learner.learner import StepObserver

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class UpdateTrace:
    """One optimiser update.

    order: the step's rows that it trains. packing: which of these share a packed row. logprobs [M]
    and slopes [M] of each packed row, where a slope is the loss's derivative by the log-prob.
    gradient_bits: for each trained parameter the sum of its gradient's bits as whole numbers.
    """

    order: list[int]
    packing: tuple[tuple[int, ...], ...]
    batches: list[PackedBatch] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    slopes: dict[int, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    loss: float = 0.0
    gradient_bits: list[int] = field(default_factory=list)
    grad_norm: float = 0.0
    learning_rate: float = 0.0


@dataclass(slots=True)
class StepTrace(StepObserver):
    """Keeps what a learner computes in one train step.

    rows: as they were read. prepared: the same rows with the values that are computed once.
    """

    rows: list[TokenRow] = field(default_factory=list)
    prepared: list[TokenRow] = field(default_factory=list)
    updates: list[UpdateTrace] = field(default_factory=list)
    python_random: str = ""
    torch_random: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    parameters: tuple[str, ...] = ()

    def begin(self, rows: Sequence[TokenRow], orders: random.Random) -> None:
        """Take the rows, and the random states from which the step begins."""
        self.rows = list(rows)
        self.python_random = repr(orders.getstate())
        self.torch_random = torch.get_rng_state()

    def end_prepare(self, rows: Sequence[TokenRow]) -> None:
        """Take the rows with the values that are computed once."""
        self.prepared = list(rows)

    def begin_update(self, rows: Sequence[TokenRow], packing: tuple[tuple[int, ...], ...]) -> None:
        """Take the order and the packing of an update's rows, which are `prepared` ones."""
        numbers = {id(row): number for number, row in enumerate(self.prepared)}
        self.updates.append(UpdateTrace([numbers[id(row)] for row in rows], packing))

    def watch(self, batch: PackedBatch, logprobs: Tensor, loss: Tensor) -> None:
        """Take a packed row, its log-probs and its loss, and later the loss's slopes."""
        update = self.updates[-1]
        number = len(update.batches)
        update.batches.append(batch.to("cpu"))
        update.logprobs.append(logprobs.detach().cpu().clone())
        update.losses.append(float(loss.detach()))

        def take(slopes: Tensor) -> None:
            update.slopes[number] = slopes.detach().cpu().clone()

        if logprobs.requires_grad:
            logprobs.register_hook(take)  # type: ignore[no-untyped-call]

    def end_backward(self, loss: float, policy: PolicyModel) -> None:
        """Take the loss and the gradients before they are clipped."""
        update = self.updates[-1]
        update.loss = loss
        trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        self.parameters = tuple(name for name, _ in trained)
        update.gradient_bits = [_sum_of_bits(p.grad) for _, p in trained]

    def end_update(self, step: StepReport) -> None:
        """Take the norm of the gradients and the learning rate."""
        self.updates[-1].grad_norm = step.grad_norm
        self.updates[-1].learning_rate = step.learning_rate


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of numbers as whole numbers, so that NaN equals NaN and 0 differs from -0."""
    whole: Any = _BITS[values.element_size()]
    return values.contiguous().view(whole)


def _sum_of_bits(gradient: Tensor | None) -> int:
    return 0 if gradient is None else int(bits_of(gradient).sum(dtype=torch.int64))
