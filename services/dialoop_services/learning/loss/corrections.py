"""Weights for tokens that the engine sampled from another distribution than the trainer computes.

The mismatch is m = log proximal - log inference: both are of the policy that sampled, as the
trainer and as the engine compute it, plus what was trained since. A weight multiplies the token's
advantage, so every surrogate that is linear in the advantage is corrected alike.

tis: min(exp(m), high), truncated importance sampling (F. Yao et al., "Your efficient RL framework
secretly brings you off-policy RL training", 2025). icepop: exp(m) inside [low, high], else 0
(arXiv 2510.18855). token_mask: 1 inside, else 0. sequence_mask: 1 where exp(mean m) of the whole
sequence lies inside, else 0. kl_mask: 1 where d^2 / 2 is at most high, else 0, d = log policy - log
inference (torchrl's kl_mask_threshold, which its doc calls one to the reference) or, against the
reference, log policy - log ref.

TRL's "token_truncate" is tis and its "token_mask" icepop. Its sequence modes take the ratio of the
whole sequence, exp(sum m), and multiply the loss by it, where sequence_mask here takes exp(mean m)
and only keeps or drops. torchrl divides what kl_mask keeps by the tokens kept, we by all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_services.learning.loss.loss_inputs import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

    from dialoop_services.learning.loss.loss_inputs import LossInputs

CorrectionKind = Literal["tis", "icepop", "token_mask", "sequence_mask", "kl_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which weights, and the band of ratios exp(m) that is kept."""

    kind: CorrectionKind
    low: float = 0.5
    high: float = 2.0
    against: Literal["inference", "ref"] = "inference"
    """Whom kl_mask keeps near; the other kinds are of the sampler's mismatch."""

    def __post_init__(self) -> None:
        if self.against != "inference" and self.kind != "kl_mask":
            raise InvalidConfig(
                f"Correction {self.kind} is of the sampler's mismatch, not against {self.against}.",
                reason=Reason.CORRECTION_AGAINST_REFERENCE,
                remedy="Use kl_mask, or leave correction_to out of [train.objective].",
            )

    @property
    def needs_proximal(self) -> bool:
        """Whether the policy must be asked for its log-probs before the train step."""
        return self.kind != "kl_mask"

    def weights(self, inputs: LossInputs) -> Tensor:
        """Weights [M] at least 0, without gradient."""
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
        """The inputs with weighted advantages, and what the weights did."""
        weights = self.weights(inputs)
        # `where`: an advantage of a token that was cut out must not count, whatever it is.
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
