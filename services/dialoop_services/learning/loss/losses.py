"""Losses: pure functions from LossInputs to a loss to minimise and its metrics.

A loss of your own is ten lines in a file of yours, named in the config as "package.module:mine":

    def mine(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.inference_logprobs).exp()
        loss = inputs.mean(-ratio * inputs.advantages)
        return LossOutput(loss, {"ratio": inputs.token_mean(ratio)})

`inputs.mean` aggregates as the config says (by token, sequence, prompt or a constant). KL terms,
entropy bonuses and corrections for sampler mismatch are
`dialoop_services.learning.loss.objective`'s part: they go with any loss. Below r =
exp(inputs.log_ratio()) = policy / inference, or policy / proximal where the train step's first
policy is known, and A is the advantage.

"TRL" and "torchrl" below are what their 1.16 and 0.14 compute on the same tensors, as
tests/parity/learning/test_peers.py shows; the one that a loss does not name has none like it.
"""

from __future__ import annotations

import torch

from dialoop_services.learning.loss.loss_inputs import MAX_LOG_RATIO, LossInputs, LossOutput

__all__ = ["LossInputs", "LossOutput"]


def grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0
) -> LossOutput:
    """Clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    GRPO (arXiv 2402.03300), with PPO's clip (1707.06347); clip_high 0.28 is DAPO's (2503.14476).
    dual_clip c > 1 bounds the term of negative advantages at c A (1912.09729); 0 is without.

    TRL: loss_type "grpo" is this by sequence, "bnpo" and "dapo" by token, "dr_grpo" by constant.
    Its delta is dual_clip from 1 + clip_high upwards; below, it also stops good tokens at delta.
    torchrl: GRPOLoss and DAPO are this by token, and by sequence with "prompt_mean".
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
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy: weights are clipped, not gradients.

    CISPO (MiniMax-M1, arXiv 2506.13585), which has no lower bound; 5 is the cap of 2510.13786.
    TRL: the same, its epsilon_high being the cap, our 1 + clip_high. torchrl: CISPOLoss
    differentiates clip(r) A itself, so clipped tokens learn nothing there; the others as here.
    """
    ratio, advantages = inputs.log_ratio().exp().detach(), inputs.require("advantages")
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-weight * advantages * inputs.policy_logprobs)
    return LossOutput(loss, {}, (weight != ratio) & (advantages != 0))


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """-min(s A, clip(s) A) with one ratio per sequence: s = exp(mean over its tokens of log r).

    GSPO (arXiv 2507.18071); to be aggregated by sequence. TRL: importance_sampling_level
    "sequence" with "grpo"; its "luspo" is this by constant 1.
    """
    advantages = inputs.require("advantages")
    ratio = inputs.sequence_mean(inputs.log_ratio()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-torch.minimum(ratio * advantages, bounded * advantages))
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return LossOutput(loss, {}, clipped & (advantages != 0))


def reinforce(inputs: LossInputs) -> LossOutput:
    """-r A, not clipped: the policy gradient with importance sampling token by token.

    With leave-one-out advantages RLOO (arXiv 2402.14740), of which this is the token form.
    TRL: RLOOTrainer has one ratio for the whole sequence, the product of its tokens', and clips it;
    its gradient on-policy is this one's by constant 1.
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
    """-r A + penalty * log(r)^2, without the tokens whose probability already moved too far.

    Left out of the first term: probability rose by more than mask_high with A > 0, or fell by more
    than mask_low with A < 0. It is prime-rl's default (DPPO's binary total variation): a mask
    by probability, not ratio, lets rare tokens move.
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
    """-w min(r A, clip(r) A), r = policy / proximal, w = min(max_weight, proximal / sampler).

    The trust region is around the policy as the train step began, however stale the data
    (arXiv 2110.00641; AReaL, 2505.24298). TRL: its clip with the sampler ratios of mode
    "token_truncate", clip_max being max_weight.
    """
    mismatch = inputs.require("proximal_logprobs") - inputs.require("inference_logprobs")
    weight = mismatch.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=max_weight)
    ratio, advantages = inputs.log_ratio().exp(), inputs.require("advantages") * weight
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = inputs.mean(-torch.minimum(ratio * advantages, bounded * advantages))
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return LossOutput(loss, {}, clipped & (advantages != 0))


def distill(inputs: LossInputs) -> LossOutput:
    """-r sg(log teacher - log policy): the gradient of KL(policy || teacher) on sampled tokens.

    On-policy distillation (arXiv 2306.13649) with the teacher's log-probs as ref_logprobs; rewards
    play no part. torchrl: DistillationLoss differentiates the k3 estimate instead, which here is
    kl_coeff 1 by sequence and no other loss. TRL's distillation needs the teacher's distributions.
    """
    gain = -inputs.log_ratio_to("ref_logprobs").detach()
    ratio = inputs.log_ratio().exp()
    return LossOutput(inputs.mean(-ratio * gain), {"teacher_log_ratio": inputs.token_mean(gain)})


def sft(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of the demonstrated tokens.

    TRL: SFTTrainer's "nll" is this by token. torchrl: SFTLoss is this by sequence, and with
    normalize_by_seq_length off by constant 1; its KL term is divided by prompt tokens too.
    """
    nll = -inputs.policy_logprobs
    return LossOutput(inputs.mean(nll), {"nll": inputs.token_mean(nll).detach()})


def minor_sft(inputs: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """-log sigmoid(beta (log policy - log ref)) of each sequence's mean log-probs; by sequence.

    MinorSFT (arXiv 2408.10642) holds back what already is likelier than under the reference.
    torchrl: the same; with normalize_by_seq_length off, beta times the sequence's length.
    """
    gain = inputs.sequence_mean(inputs.log_ratio_to("ref_logprobs"))
    loss = inputs.mean(-torch.nn.functional.logsigmoid(beta * gain))
    return LossOutput(loss, {"nll": inputs.token_mean(-inputs.policy_logprobs).detach()})
