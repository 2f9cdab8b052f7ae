"""Losses: pure functions from LossInputs to a loss to minimise and its metrics.

A loss of your own is ten lines in a file of yours, named in the config as "package.module:mine":

    def mine(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.inference_logprobs).exp()
        loss = inputs.mean(-ratio * inputs.advantages)
        return LossOutput(loss, {"ratio": inputs.token_mean(ratio)})

Shapes: every per-token value is float [M], for the M trained tokens of one packed row. The loss is
a scalar [], and `clipped` is bool [M]. `inputs.mean` turns [M] into the scalar as the config says
(by token, sequence, prompt or a constant). Every aggregation gives each token a weight, whose
denominator counts the whole update before any mask, so the losses and metrics of several packed
rows (and ranks) add up to those of one big row. KL terms, entropy bonuses and corrections for
sampler mismatch go with any loss: see `dialoop_learning.loss.objective`.

Below, r [M] = exp(inputs.log_ratio()) is policy / inference, or policy / proximal where the
log-probs of the train step's first policy are known. A [M] is the advantage, sg stops the gradient,
and each formula is one token's term. "TRL" and "torchrl" are what TRL 1.16 and torchrl 0.14 compute
on the same tensors, as tests/parity/learning/test_peers.py shows. A library that a docstring does
not name has no such loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from dialoop_learning.loss.facts import Aggregation

    Loss = Callable[["LossInputs"], "LossOutput"]


MAX_LOG_RATIO = 20.0
"""Bound in nats to which log-ratios are clamped before exp, so that it does not overflow.

TRL and torchrl do not clamp.
"""


class LossOutput(NamedTuple):
    """The loss (a scalar [] with gradient) and metrics (scalars that add up over packed rows).

    clipped: bool [M], the tokens whose term the loss left out or bounded. Only metrics read it.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    clipped: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The M trained tokens of one packed row.

    policy_logprobs: float [M], with gradient. entropy: float [M], with gradient.
    Float [M] without gradient, None where unknown: inference_logprobs of the engine that sampled,
    proximal_logprobs of the policy as the train step began, ref_logprobs of a reference or teacher,
    advantages, staleness in policy versions, depth (tokens before it in its sequence).
    sequence_index: int64 [M], the token's sequence in the row. loss_mask: bool [M].
    num_tokens, num_sequences, num_prompts: counts of the whole update, over all rows and ranks. All
    sequences of one trajectory count as one. A count of 0 is read as 1: the mean of nothing is 0.
    prompt_num_tokens, trajectory_num_tokens: [M], how many trained tokens the token's prompt, and
    its trajectory, have in the update. Without trajectory_num_tokens each sequence is one.
    """

    policy_logprobs: Tensor
    sequence_index: Tensor
    loss_mask: Tensor
    num_tokens: int
    num_sequences: int
    num_prompts: int = 1
    prompt_num_tokens: Tensor | None = None
    trajectory_num_tokens: Tensor | None = None
    inference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None
    staleness: Tensor | None = None
    depth: Tensor | None = None
    aggregation: Aggregation = "token"
    constant: float = 1.0

    def mean(self, values: Tensor) -> Tensor:
        """Return this row's share [] of the update's mean of values [M], by the aggregation.

        With "none" return the values [M] themselves, 0 where the mask is not set.
        """
        if self.aggregation == "none":
            return torch.where(self.loss_mask, values, 0.0)
        if self.aggregation == "token":
            return self.token_mean(values)
        # `where`, because a masked token may hold inf, and 0 * inf is not a number.
        return torch.where(self.loss_mask, values * self._weights(), 0.0).sum()

    def token_mean(self, values: Tensor) -> Tensor:
        """Return this row's share [] of the update's token mean of values [M], for metrics."""
        return torch.where(self.loss_mask, values, 0.0).sum() / max(1, self.num_tokens)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of values [M] over each sequence, at each of its tokens, [M]."""
        sums = torch.zeros_like(values).index_add(
            0, self.sequence_index, torch.where(self.loss_mask, values, 0.0)
        )
        return sums[self.sequence_index] / self.sequence_num_tokens()

    def sequence_num_tokens(self) -> Tensor:
        """Return how many counted tokens each token's sequence has, at least 1, [M]."""
        counted = self.loss_mask.to(self.policy_logprobs.dtype)
        counts = torch.zeros_like(counted).index_add(0, self.sequence_index, counted)
        return counts[self.sequence_index].clamp(min=1)

    def require(self, name: str) -> Tensor:
        """Return the named tensor [M].

        Raises InvalidInput (LOSS_INPUT_MISSING) when the data has none, and (RAGGED) when it does
        not hold one value per token.
        """
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise InvalidInput(
                f"This loss needs {name}.",
                reason=Reason.LOSS_INPUT_MISSING,
                remedy=_REMEDIES.get(name, "Set the loss option that uses it to 0."),
            )
        if values.shape != self.policy_logprobs.shape:
            raise InvalidInput(
                f"{name} has shape {list(values.shape)}, and the log-probs have "
                f"{list(self.policy_logprobs.shape)}.",
                reason=Reason.RAGGED,
                remedy="Give one value per trained token.",
            )
        return values

    def log_ratio(self) -> Tensor:
        """Return log(policy / base) [M], clamped to +-20 nats.

        The base is the policy as the train step began (proximal_logprobs) where that is known, else
        the engine's own log-probs.
        """
        is_known = self.proximal_logprobs is not None
        return self.log_ratio_to("proximal_logprobs" if is_known else "inference_logprobs")

    def log_ratio_to(self, name: str) -> Tensor:
        """Return log(policy / named) [M], clamped to +-20 nats."""
        difference = self.policy_logprobs - self.require(name)
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def _weights(self) -> Tensor:
        # No denominator is 0, because a weight of inf would make the gradients NaN.
        num_sequences = max(1, self.num_sequences)
        if self.aggregation == "sequence":
            num_tokens = self.sequence_num_tokens()
            if self.trajectory_num_tokens is not None:
                num_tokens = self.require("trajectory_num_tokens").clamp(min=1)
            return 1.0 / (num_tokens * num_sequences)
        if self.aggregation == "prompt":
            num_tokens = self.require("prompt_num_tokens").clamp(min=1)
            return 1.0 / (num_tokens * max(1, self.num_prompts))
        ones = torch.ones_like(self.policy_logprobs)
        return ones if self.aggregation == "sum" else ones / (num_sequences * self.constant)


_REMEDIES = {
    "advantages": "Train on scored groups: the scorer sets advantages.",
    "inference_logprobs": "Train on tokens an engine sampled; demonstrations have none.",
    "proximal_logprobs": "Name the loss in the config: the trainer then computes them.",
    "ref_logprobs": "Set [scorer] reference_logprobs and a reference or teacher model.",
    "entropy": "Name the loss in the config: the trainer then computes it.",
    "prompt_num_tokens": "Give every row its prompt.",
}


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
    objective, clipped = _clip(ratio, advantages, clip_low, clip_high)
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
    objective, clipped = _clip(ratio, advantages, clip_low, clip_high)
    return LossOutput(inputs.mean(-objective), {}, clipped & (advantages != 0))


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
    objective, clipped = _clip(ratio, advantages, clip_low, clip_high)
    return LossOutput(inputs.mean(-objective), {}, clipped & (advantages != 0))


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


def self_distillation(inputs: LossInputs) -> LossOutput:
    """Return `distill`'s term with the policy as its own teacher: -r sg(log teacher - log policy).

    The teacher is the policy at the start of the train step. Its prompt also says which checks the
    answer failed, and shows a successful answer of the group. ref_logprobs are its log-probs [M].
    Source: SDPO (arXiv 2601.20802), which minimises sum_t KL(policy(. | x, y_<t) ||
    sg(policy(. | x, feedback, y_<t))). It sums over the likeliest tokens and averages the teacher's
    weights over steps. Here the sampled token stands for the sum, as with "sampled_token" in TRL's
    SDPOTrainer, whose teacher "live" is this one.
    """
    return distill(inputs)


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


def _clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective [M], and which tokens lie beyond its bounds [M]."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    beyond = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return torch.minimum(ratio * advantages, bounded * advantages), beyond
