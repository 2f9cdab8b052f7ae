"""Weights for tokens that the engine sampled from another distribution than the trainer computes.

The mismatch is m = log proximal - log inference [M]. Both are log-probs of the policy that sampled,
one as the trainer and one as the engine computes them. What was trained since is part of m too. A
weight [M] multiplies the advantage of its token, which corrects every surrogate that is linear in
the advantage in the same way.

tis: min(exp(m), high), truncated importance sampling (F. Yao et al., "Your efficient RL framework
secretly brings you off-policy RL training", 2025).
icepop: exp(m) inside [low, high], else 0 (arXiv 2510.18855).
token_mask: 1 where exp(m) is inside [low, high], else 0.
sequence_mask: 1 where exp(mean m) of the whole sequence is inside, else 0.
kl_mask: 1 where d^2 / 2 is at most high, else 0. d is log policy - log inference or, against the
reference, log policy - log ref. It is torchrl's kl_mask_threshold, whose documentation names the
reference where its code reads the sampler.

TRL's "token_truncate" is tis and its "token_mask" is icepop. TRL's sequence modes multiply the loss
by the ratio of the whole sequence, exp(sum m); sequence_mask takes exp(mean m) and only keeps or
drops. torchrl divides what kl_mask keeps by the tokens kept; Dialoop divides by all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from torch import Tensor

from dialoop_learning.loss.losses import MAX_LOG_RATIO, LossInputs

CorrectionKind = Literal["tis", "icepop", "token_mask", "sequence_mask", "kl_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A kind of weights, and the band [low, high] of ratios exp(m) that they keep."""

    kind: CorrectionKind
    low: float = 0.5
    high: float = 2.0
    against: Literal["inference", "ref"] = "inference"
    """Log-probs that kl_mask compares the policy's with; the other kinds use the sampler's only."""

    def __post_init__(self) -> None:
        if self.against != "inference" and self.kind != "kl_mask":
            raise InvalidConfig(
                f"Correction {self.kind} compares with the sampler only, not with {self.against}.",
                reason=Reason.CORRECTION_AGAINST_REFERENCE,
                remedy="Use kl_mask, or leave correction_to out of [train.objective].",
            )

    @property
    def needs_proximal(self) -> bool:
        """Return whether the policy's log-probs must be computed before the train step."""
        return self.kind != "kl_mask"

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return the weights float [M] of the M tokens, at least 0 and without gradient."""
        with torch.no_grad():
            if self.kind == "kl_mask":
                log_ratio = inputs.log_ratio_to(f"{self.against}_logprobs")
                return (log_ratio.square() / 2 <= self.high).to(log_ratio.dtype)
            mismatch = _mismatch(inputs)
            ratio = mismatch.exp()
            if self.kind == "tis":
                return ratio.clamp(max=self.high)
            if self.kind == "sequence_mask":
                ratio = inputs.sequence_mean(mismatch).exp()
            inside = (ratio >= self.low) & (ratio <= self.high)
            kept = ratio if self.kind == "icepop" else torch.ones_like(ratio)
            return torch.where(inside, kept, 0.0)

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the inputs with weighted advantages [M], and metrics (scalars) of the weights."""
        weights = self.weights(inputs)
        # `where`, because the advantage of a token with weight 0 may be inf, and 0 * inf is NaN.
        advantages = torch.where(weights > 0, inputs.require("advantages") * weights, 0.0)
        cut = (weights == 0).to(weights.dtype)
        metrics = {
            "correction_weight": inputs.token_mean(weights),
            "correction_masked": inputs.token_mean(cut),
        }
        return replace(inputs, advantages=advantages), metrics


def _mismatch(inputs: LossInputs) -> Tensor:
    difference = inputs.require("proximal_logprobs") - inputs.require("inference_logprobs")
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
