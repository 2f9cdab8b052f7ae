"""One update of the policy from packed rows: forward, loss, backward, step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.learning.losses import LossInputs, combine_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.learning.losses import Loss
    from services.learning.models import PolicyModel
    from services.learning.optim import GuardedOptimizer, StepReport
    from services.learning.packing import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimiser update: its loss, token-mean metrics and step."""

    loss: float
    metrics: dict[str, float]
    step: StepReport


def loss_inputs(
    batch: PackedBatch,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> LossInputs:
    """The batch's trained tokens as a loss reads them; counts default to this batch's own."""

    def trained(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.gather(values)

    return LossInputs(
        policy_logprobs=logprobs,
        sequence_index=batch.gather(batch.sample_mask),
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        num_tokens=num_tokens or batch.num_loss_tokens,
        num_sequences=num_sequences or batch.num_sequences,
        inference_logprobs=trained(batch.inference_logprobs),
        ref_logprobs=trained(batch.ref_logprobs),
        advantages=trained(batch.advantages),
        entropy=entropy,
    )


def update(
    policy: PolicyModel,
    optimizer: GuardedOptimizer,
    rows: Sequence[PackedBatch],
    loss: Loss,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> UpdateReport:
    """One optimiser update over packed rows; the result does not depend on how they are cut."""
    num_tokens = max(1, sum(row.num_loss_tokens for row in rows))
    num_sequences = sum(row.num_sequences for row in rows)
    total, metrics = 0.0, []
    for row in rows:
        scores = policy(row, temperature=temperature, with_entropy=with_entropy)
        output = loss(
            loss_inputs(
                row,
                scores.logprobs,
                entropy=scores.entropy,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        total += float(output.loss.detach())
        metrics.append(output.metrics)
    step = optimizer.step(total)
    return UpdateReport(loss=total, metrics=combine_metrics(metrics), step=step)
