"""Losses: pure functions from LossInputs to a loss to minimise and its metrics.

A loss of your own is ten lines in a file of yours, named in the config as "package.module:mine":

    def mine(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.inference_logprobs).exp()
        loss = inputs.mean(-ratio * inputs.advantages)
        return LossOutput(loss, {"ratio": inputs.mean(ratio)})

`inputs.mean` divides by the token count of the whole train step, counted before any mask. So the
losses and metrics of several packed rows (and ranks) add up to those of one big row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from dialoop.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    Loss = Callable[["LossInputs"], "LossOutput"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats before exp, which else overflows."""


class LossOutput(NamedTuple):
    """The loss (a scalar with gradient) and metrics (scalars that add up over packed rows)."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The M trained tokens of one packed row.

    policy_logprobs float32 [M] with gradient; the others [M] without: inference_logprobs of the
    engine that sampled, ref_logprobs, advantages, entropy (None where unknown); sequence_index
    int64 [M], which sequence of the row; loss_mask bool [M]. num_tokens and num_sequences count
    the whole train step, over all rows and ranks.
    """

    policy_logprobs: Tensor
    sequence_index: Tensor
    loss_mask: Tensor
    num_tokens: int
    num_sequences: int
    inference_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """This row's share of the train step's token mean of values [M]."""
        # `where`, because a masked token may hold inf, and 0 * inf is not a number.
        return torch.where(self.loss_mask, values, 0.0).sum() / self.num_tokens

    def require(self, name: str) -> Tensor:
        """The named tensor; InvalidInput (LOSS_INPUT_MISSING) when the data has none."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise InvalidInput(
                f"This loss needs {name}.",
                reason="LOSS_INPUT_MISSING",
                remedy="Have the scorer add it, or set the loss option that uses it to 0.",
            )
        if values.shape != self.policy_logprobs.shape:
            raise InvalidInput(
                f"{name} is {list(values.shape)}, the log-probs {list(self.policy_logprobs.shape)}",
                reason="RAGGED",
                remedy="Give one value per trained token.",
            )
        return values

    def log_ratio(self) -> Tensor:
        """log(policy / inference) [M], clamped; the engine's own log-probs are the base."""
        difference = self.policy_logprobs - self.require("inference_logprobs")
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl_coeff: float = 0.0
) -> LossOutput:
    """Clipped surrogate, token mean: -min(r A, clip(r, 1 - low, 1 + high) A) + coeff * KL(ref).

    r = policy / inference. GRPO (arXiv 2402.03300); clip_high 0.28 is DAPO's (arXiv 2503.14476).
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.require("advantages")
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-torch.minimum(ratio * advantages, clipped * advantages))
    metrics = _ratio_metrics(inputs, log_ratio)
    is_clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    metrics["clip_fraction"] = inputs.mean((is_clipped & (advantages != 0)).float())
    if kl_coeff:
        kl = inputs.mean(k3(inputs.policy_logprobs, inputs.require("ref_logprobs")))
        loss = loss + kl_coeff * kl
        metrics["kl_to_ref"] = kl.detach()
    return LossOutput(loss, metrics)


def dppo_mask(
    inputs: LossInputs,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    ratio_penalty: float = 1e-3,
) -> LossOutput:
    """-r A + penalty * log(r)^2, without the tokens whose probability already moved too far.

    Left out of the first term: probability rose by more than mask_high with A > 0, or fell by more
    than mask_low with A < 0. This is prime-rl's default loss (DPPO's binary total variation).
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.require("advantages")
    rise = inputs.policy_logprobs.exp() - inputs.require("inference_logprobs").exp()
    masked = torch.where(advantages > 0, rise > mask_high, rise < -mask_low) & (advantages != 0)
    objective = torch.where(masked, 0.0, log_ratio.exp() * advantages)
    loss = inputs.mean(ratio_penalty * log_ratio.square() - objective)
    metrics = _ratio_metrics(inputs, log_ratio)
    metrics["clip_fraction"] = inputs.mean(masked.float())
    return LossOutput(loss, metrics)


def sft(inputs: LossInputs, *, by_sequence: bool = False) -> LossOutput:
    """Negative log-likelihood of the demonstrated tokens: their mean over the train step.

    by_sequence: the mean over sequences of each sequence's own mean, so that long ones weigh no
    more than short ones.
    """
    nll = -inputs.policy_logprobs
    token_mean = inputs.mean(nll)
    loss = _sequence_mean(inputs, nll) if by_sequence else token_mean
    return LossOutput(loss, {"nll": token_mean.detach()} | _entropy_metric(inputs))


def k3(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - policy, per token: KL(policy, ref), unbiased and never below 0.

    The k3 estimator of J. Schulman, "Approximating KL divergence" (2020).
    """
    difference = (ref_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def combine_metrics(rows: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add up the metrics of a train step's rows, and derive `ess` where ratios are known.

    ess, the effective sample size as a share of all tokens: mean(r)^2 / mean(r^2), 1 on-policy.
    """
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            totals[name] = totals.get(name, 0.0) + float(torch.as_tensor(value).detach())
    if totals.get("ratio_squared"):
        totals["ess"] = totals["ratio"] ** 2 / totals["ratio_squared"]
    return totals


def _ratio_metrics(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        ratio = log_ratio.exp()
        metrics = {
            "approx_kl": inputs.mean(ratio - log_ratio - 1),
            "ratio": inputs.mean(ratio),
            "ratio_squared": inputs.mean(ratio.square()),
        }
    return metrics | _entropy_metric(inputs)


def _entropy_metric(inputs: LossInputs) -> dict[str, Tensor]:
    return {} if inputs.entropy is None else {"entropy": inputs.mean(inputs.entropy)}


def _sequence_mean(inputs: LossInputs, values: Tensor) -> Tensor:
    index = inputs.sequence_index
    counts = torch.zeros_like(values).index_add(0, index, inputs.loss_mask.to(values.dtype))
    kept = torch.where(inputs.loss_mask, values / counts[index].clamp(min=1), 0.0)
    return kept.sum() / inputs.num_sequences
