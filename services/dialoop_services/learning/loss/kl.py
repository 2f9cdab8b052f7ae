"""Estimators of KL(policy || other) from the tokens the policy sampled, one number per token.

With d = log other - log policy (J. Schulman, "Approximating KL divergence", 2020):
k1 = -d, unbiased, may be negative; k2 = d^2 / 2, biased, low variance; k3 = exp(d) - 1 - d,
unbiased and never negative.

As a loss only k2's gradient is that of the KL (in expectation, on-policy); k1's is zero in
expectation and k3's that of the KL with its sides changed (Tang and Munos, arXiv 2506.09477). As a
penalty in a reward k1 is the right one.

TRL's GRPOTrainer adds k3 times the policy's ratio unless use_bias_correction_kl is off, then k3 as
here; its RLOOTrainer takes k1 from the rewards, as our scorer does. torchrl adds k3 divided by all
positions of the batch, those that nobody trains and padding among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dialoop_services.learning.loss.loss_inputs import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Log policy - log other."""
    return -_difference(policy_logprobs, other_logprobs)


def k2(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """(log policy - log other)^2 / 2."""
    return _difference(policy_logprobs, other_logprobs).square() / 2


def k3(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log other - log policy."""
    difference = _difference(policy_logprobs, other_logprobs)
    return difference.exp() - difference - 1


def estimate(kind: Estimator, policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The estimator called `kind`."""
    return {"k1": k1, "k2": k2, "k3": k3}[kind](policy_logprobs, other_logprobs)


def _difference(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    return (other_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
