"""Losses: pure functions from LossInputs to a loss to minimise and its metrics.

A loss of your own is ten lines in a file of yours, named in the config as "package.module:mine":

    def mine(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.inference_logprobs).exp()
        loss = inputs.mean(-ratio * inputs.advantages)
        return LossOutput(loss, {"ratio": inputs.token_mean(ratio)})

Shapes: every per-token value is float [M], for the M trained tokens of one packed row. The loss is
a scalar [], and `clipped` is bool [M]. `inputs.mean` turns [M] into the scalar as the config says
(by token, sequence, prompt or a constant). KL terms, entropy bonuses and corrections for sampler
mismatch go with any loss: see `dialoop_learning.loss.objective`.

Below, r [M] = exp(inputs.log_ratio()) is policy / inference, or policy / proximal where the
log-probs of the train step's first policy are known. A [M] is the advantage, sg stops the gradient,
and each formula is one token's term. "TRL" and "torchrl" are what TRL 1.16 and torchrl 0.14 compute
on the same tensors, as tests/parity/learning/test_peers.py shows. A library that a docstring does
not name has no such loss.
"""

from __future__ import annotations

import torch

from dialoop_learning.loss.loss_inputs import MAX_LOG_RATIO, LossInputs, LossOutput

__all__ = ["LossInputs", "LossOutput"]


def grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0
) -> LossOutput:
    """Return the clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Source: GRPO (arXiv 2402.03300) with PPO's clip (arXiv 1707.06347); clip_high 0.28 is DAPO's
    (arXiv 2503.14476). dual_clip c > 1 bounds the term of negative advantages at c A
    (arXiv 1912.09729); with 0 there is no such bound.

    TRL: loss_type "grpo" is this by sequence, "bnpo" and "dapo" by token, "dr_grpo" by constant.
    TRL's delta equals dual_clip from 1 + clip_high upwards; a smaller delta also stops tokens of
    positive advantage at delta. torchrl: GRPOLoss and DAPO are this by token, and by sequence with
    "prompt_mean".
    """
    ratio, advantages = inputs.log_ratio().exp(), inputs.require("advantages")
    objective = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    if dual_clip:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return LossOutput(inputs.mean(-objective), {}, clipped & (advantages != 0))


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutput:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy: every token keeps a gradient.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585), which has no lower bound; the cap 5 is that of
    arXiv 2510.13786. TRL: the same; its epsilon_high is the cap, here 1 + clip_high. torchrl:
    CISPOLoss differentiates clip(r) A itself, so its clipped tokens learn nothing; its other
    tokens learn as here.
    """
    ratio, advantages = inputs.log_ratio().exp().detach(), inputs.require("advantages")
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-weight * advantages * inputs.policy_logprobs)
    return LossOutput(loss, {}, (weight != ratio) & (advantages != 0))


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """Return -min(s A, clip(s) A) with one ratio per sequence: s = exp(mean of its tokens' log r).

    s is [M]: all tokens of a sequence have the same. Source: GSPO (arXiv 2507.18071), which
    aggregates by sequence. TRL: importance_sampling_level "sequence" with "grpo"; its "luspo" is
    this by constant 1.
    """
    advantages = inputs.require("advantages")
    ratio = inputs.sequence_mean(inputs.log_ratio()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-torch.minimum(ratio * advantages, bounded * advantages))
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return LossOutput(loss, {}, clipped & (advantages != 0))


def reinforce(inputs: LossInputs) -> LossOutput:
    """Return -r A without a clip: the policy gradient with importance sampling token by token.

    Source: REINFORCE (R. Williams, 1992). With leave-one-out advantages it is the token form of
    RLOO (arXiv 2402.14740). TRL: RLOOTrainer clips one ratio for the whole sequence, the product
    of its tokens' ratios; its on-policy gradient is this one's by constant 1.
    """
    ratio = inputs.log_ratio().exp()
    return LossOutput(inputs.mean(-ratio * inputs.require("advantages")), {})


def dppo_mask(
    inputs: LossInputs,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    ratio_penalty: float = 1e-3,
) -> LossOutput:
    """Return -r A + ratio_penalty * log(r)^2; tokens that moved too far lack the first term.

    These are tokens with A > 0 whose probability rose by more than mask_high, and tokens with
    A < 0 whose probability fell by more than mask_low. A mask by probability, not by ratio, lets
    rare tokens move. Source: prime-rl's default loss (DPPO's binary total variation).
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.require("advantages")
    rise = inputs.policy_logprobs.exp() - (inputs.policy_logprobs - log_ratio).exp()
    masked = torch.where(advantages > 0, rise > mask_high, rise < -mask_low) & (advantages != 0)
    objective = torch.where(masked, 0.0, log_ratio.exp() * advantages)
    loss = inputs.mean(ratio_penalty * log_ratio.square() - objective)
    return LossOutput(loss, {}, masked)


def decoupled_ppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, max_weight: float = 5.0
) -> LossOutput:
    """Return -w min(r A, clip(r) A) with w = min(max_weight, proximal / sampler).

    r is policy / proximal. w is [M], without gradient. The trust region is around the policy as the
    train step began, however stale the data is. Source: arXiv 2110.00641; AReaL, arXiv 2505.24298.
    TRL: its clip with the sampler ratios of mode "token_truncate", where clip_max is max_weight.
    """
    mismatch = inputs.require("proximal_logprobs") - inputs.require("inference_logprobs")
    weight = mismatch.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=max_weight)
    ratio, advantages = inputs.log_ratio().exp(), inputs.require("advantages") * weight
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-torch.minimum(ratio * advantages, bounded * advantages))
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return LossOutput(loss, {}, clipped & (advantages != 0))


def distill(inputs: LossInputs) -> LossOutput:
    """Return -r sg(log teacher - log policy), whose gradient is that of KL(policy || teacher).

    The teacher's log-probs [M] of the sampled tokens are ref_logprobs; rewards play no part.
    Source: on-policy distillation (arXiv 2306.13649). torchrl: DistillationLoss differentiates the
    k3 estimate instead, which here is kl_coeff 1 by sequence and no other loss. TRL's distillation
    needs the teacher's whole distributions.
    """
    gain = -inputs.log_ratio_to("ref_logprobs").detach()
    ratio = inputs.log_ratio().exp()
    return LossOutput(inputs.mean(-ratio * gain), {"teacher_log_ratio": inputs.token_mean(gain)})


def sft(inputs: LossInputs) -> LossOutput:
    """Return -log policy of the demonstrated tokens: their negative log-likelihood in nats.

    Source: maximum likelihood. TRL: SFTTrainer's "nll" is this by token. torchrl: SFTLoss is this
    by sequence, and by constant 1 with normalize_by_seq_length off; its KL term is divided by
    prompt tokens too.
    """
    nll = -inputs.policy_logprobs
    return LossOutput(inputs.mean(nll), {"nll": inputs.token_mean(nll).detach()})


def minor_sft(inputs: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """Return -log sigmoid(beta * gain), gain = each sequence's mean of log policy - log ref.

    gain is [M]: all tokens of a sequence have the same. Sequences that are already likelier than
    under the reference learn less. Source: MinorSFT (arXiv 2408.10642), which aggregates by
    sequence. torchrl: the same; with normalize_by_seq_length off, beta times the sequence's length.
    """
    gain = inputs.sequence_mean(inputs.log_ratio_to("ref_logprobs"))
    loss = inputs.mean(-torch.nn.functional.logsigmoid(beta * gain))
    return LossOutput(loss, {"nll": inputs.token_mean(-inputs.policy_logprobs).detach()})
