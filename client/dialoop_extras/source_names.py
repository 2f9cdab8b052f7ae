"""Losses and advantages of torchrl and torchtune by their arguments, over our own.

    loss = grpo_loss(clip_epsilon=(0.2, 0.28), kl_to_ref_coeff=0.1)     # an Objective
    loss(inputs).loss

`dialoop_extras.compat` offers them as GRPOLoss, SFTLoss, MCAdvantage and so on. The losses read
LossInputs instead of a TensorDict: log-probs, which the trainer computes, not a network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from dialoop.errors import DialoopWarning, InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop_learning.loss import losses
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.loss.objective import Objective, k3
from dialoop_learning.rl.monte_carlo import trajectory_advantages, with_turn_advantages
from dialoop_learning.rl.selection import TopKWindow, with_best_alone
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from dialoop.trajectory import Group, Trajectory
    from dialoop_learning.loss.facts import Aggregation
    from dialoop_learning.rl.advantages import Aggregate
    from torch import Tensor

_AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": "token",
    "prompt_mean": "sequence",
    "none": "none",
}


def _require_no_network(name: str, network: Any) -> None:
    if network is not None:
        raise _bad(
            f"{name}: actor_network is a {type(network).__name__}, and no loss reads weights here",
            f"Write {name}() without it and call that with LossInputs, which hold the network's "
            "log-probs of the tokens; the trainer service computes them.",
        )


def grpo_loss(  # noqa: PLR0913 - the source's arguments
    actor_network: Any = None,
    *,
    clip_epsilon: float | tuple[float, float] = 0.2,
    entropy_bonus: bool = True,
    entropy_coeff: float = 0.01,
    kl_to_ref_coeff: float | None = None,
    kl_to_inference_coeff: float | None = None,
    kl_mask_threshold: float | None = None,
    aggregation: str = "token_mean",
) -> Objective:
    """Return torchrl's GRPOLoss: `losses.grpo` with its entropy bonus and k3 terms.

    kl_mask_threshold: tokens with (log policy - log inference)^2 / 2 above it are left out.
    aggregation: "token_mean", "prompt_mean", or "none" for the terms [M] of the tokens.
    Raises InvalidConfig (BAD_OPTIONS) for another aggregation.
    """
    _require_no_network("GRPOLoss", actor_network)
    if aggregation not in _AGGREGATIONS:
        raise _bad(
            f"aggregation is {aggregation!r:.40}", "Use 'token_mean', 'prompt_mean' or 'none'."
        )
    low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
    return Objective(
        loss=partial(losses.grpo, clip_low=low, clip_high=high),
        aggregation=_AGGREGATIONS[aggregation],
        correction=None
        if kl_mask_threshold is None
        else Correction(kind="kl_mask", high=kl_mask_threshold),
        kl_coeff=kl_to_ref_coeff or 0.0,
        kl_inference_coeff=kl_to_inference_coeff or 0.0,
        entropy_coeff=entropy_coeff if entropy_bonus else 0.0,
    )


def dapo(
    actor_network: Any = None,
    *,
    clip_epsilon: tuple[float, float] = (0.20, 0.28),
    **options: Any,
) -> Objective:
    """Return GRPOLoss with DAPO's clip (arXiv 2503.14476)."""
    return grpo_loss(actor_network, clip_epsilon=clip_epsilon, **options)


def sft_loss(
    actor_network: Any = None,
    *,
    loss_function: str = "sft",
    beta: float = 0.1,
    normalize_by_seq_length: bool = True,
    reduction: str = "mean",
    kl_to_ref_coeff: float | None = None,
) -> Objective | ReducedLoss:
    """Return torchrl's SFTLoss, or with loss_function "minor_sft" MinorSFT's.

    Without normalize_by_seq_length a sequence's term is its sum. reduction: "mean" or "sum" over
    sequences, or "none" for a term of each, [N]. A KL coefficient beside minor_sft is not used,
    with a warning. Raises InvalidConfig (BAD_OPTIONS) for what has no counterpart.
    """
    _require_no_network("SFTLoss", actor_network)
    if loss_function not in ("sft", "minor_sft"):
        raise _bad(f"loss_function is {loss_function!r:.40}", "Use 'sft' or 'minor_sft'.")
    is_minor = loss_function == "minor_sft"
    if is_minor and kl_to_ref_coeff:
        warnings.warn("kl_to_ref_coeff is not used with minor_sft.", DialoopWarning, stacklevel=2)
        kl_to_ref_coeff = None
    if reduction not in ("mean", "sum", "none"):
        raise _bad(f"reduction is {reduction!r:.40}", "Use 'mean', 'sum' or 'none'.")
    if is_minor and not normalize_by_seq_length:
        raise _bad("minor_sft has no counterpart here that is not normalised", "Normalise it.")
    aggregation = _SFT_AGGREGATIONS.get((normalize_by_seq_length, reduction), "none")
    objective = Objective(
        loss=partial(losses.minor_sft, beta=beta) if is_minor else losses.sft,
        aggregation=aggregation,
        kl_coeff=kl_to_ref_coeff or 0.0,
        needs_advantages=False,
        imitates=True,
    )
    if aggregation != "none":
        return objective
    return ReducedLoss(objective, normalizes=normalize_by_seq_length, sums=reduction == "sum")


@dataclass(frozen=True, slots=True)
class ReducedLoss:
    """A loss of terms by sequence, which no train step takes: their sum, or all of them, [N].

    normalizes: a sequence's term is the mean of its tokens' terms, else their sum.
    """

    objective: Objective
    normalizes: bool = field(kw_only=True)
    sums: bool = field(kw_only=True)

    def __call__(self, inputs: LossInputs) -> losses.LossOutput:
        """Return the loss, [] or [N], with the metrics of the objective."""
        output = self.objective(inputs)
        terms = output.loss / inputs.sequence_num_tokens() if self.normalizes else output.loss
        by_sequence = terms.new_zeros(inputs.num_sequences).index_add(
            0, inputs.sequence_index, terms
        )
        return output._replace(loss=by_sequence.sum() if self.sums else by_sequence)


_SFT_AGGREGATIONS: Mapping[tuple[bool, str], Aggregation] = {
    (True, "mean"): "sequence",
    (False, "mean"): "constant",
    (False, "sum"): "sum",
}


def mc_advantage(
    grpo_size: int, *, per_trajectory: Aggregate | None = None
) -> Callable[[Group], Group | list[list[float]]]:
    """Return torchrl's MCAdvantage for whole groups of `grpo_size` trajectories.

    It sets `token_advantages` by turn. per_trajectory "sum", "max" or "mean" gives instead the
    advantages of each turn, one list per trajectory.
    """
    if per_trajectory is None:
        return partial(with_turn_advantages, group_size=grpo_size)
    if per_trajectory not in ("sum", "max", "mean"):
        raise _bad(f"per_trajectory is {per_trajectory!r:.40}", "Use 'sum', 'max' or 'mean'.")

    def of_trajectories(group: Group) -> list[list[float]]:
        _require_size(group, grpo_size)
        rewards = [[turn.reward for turn in member.turns] for member in group.trajectories]
        return trajectory_advantages(rewards, aggregate=per_trajectory)

    return of_trajectories


class TopKRewardSelector:
    """torchrl's TopKRewardSelector, for whole groups or for trajectories as they come.

    Of a group of `total_dialog_turns` trajectories, the best `topk_size` have advantage 1. `add`
    returns the best of each window of so many turns of one task, and then begins a new window;
    torchrl's keeps the last trajectories and returns some of them again with each new one.
    """

    def __init__(self, total_dialog_turns: int, topk_size: int) -> None:
        if not 1 <= topk_size <= total_dialog_turns:
            raise _bad(
                f"topk_size is {topk_size} of {total_dialog_turns}",
                "Use at most total_dialog_turns.",
            )
        self._size, self._k = total_dialog_turns, topk_size
        window = TopKWindow(num_turns=total_dialog_turns, k=topk_size, aggregate="mean")
        self.add: Callable[[Trajectory], tuple[Trajectory, ...]] = window.add

    def __call__(self, group: Group) -> Group:
        """Return the group with advantage 1 on its best trajectories and 0 on the others."""
        _require_size(group, self._size)
        return with_best_alone(group, k=self._k, aggregate="mean")


def _require_size(group: Group, size: int) -> None:
    if len(group.trajectories) != size:
        raise InvalidInput(
            f"The group has {len(group.trajectories)} trajectories, not {size}.",
            reason=Reason.GROUP_INCOMPLETE,
            remedy="Give whole groups.",
        )


class ChunkedLossStats(NamedTuple):
    """torchtune's GRPOStats; scalars [] but pi_logprobs [B, T], which are 0 on padding."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratios: Tensor
    clipfrac: Tensor
    pi_logprobs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedGrpoLoss:
    """torchtune's GRPOWithChunkedOutputLoss: a mean over sequences of means over their tokens.

    The term of a token is -r A + kl_coeff * k3. Log-probs are computed in num_output_chunks parts.
    """

    num_output_chunks: int = 8
    kl_coeff: float = 0.1
    ignore_index: int = -100

    def __call__(
        self,
        pi_logits: Tensor,
        targets: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_masks: Tensor,
        *,
        inference_logprobs: Tensor | None = None,
    ) -> ChunkedLossStats:
        """Return the loss of a batch.

        pi_logits: [B, T, V]; the logits at t predict targets [B, T]. ref_logprobs: [B, T].
        advantages: [B], or [B, T]. padding_masks: bool [B, T], true on tokens to train.
        inference_logprobs: [B, T] of the engine; without them r is 1, as in torchtune, which is
        wrong for data of an older policy.

        Without B they are of a pack of `pack_sequences`: [T, V] and [T], where the logits at t
        predict targets[t + 1], and each response is a sequence.
        """
        if targets.dim() == 1:
            others = (ref_logprobs, advantages, padding_masks, inference_logprobs)
            return self._of_pack(pi_logits, targets, *others)
        keep = padding_masks.bool() & (targets != self.ignore_index)
        logprobs = self._logprobs(pi_logits, targets)
        per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(logprobs)
        base = logprobs.detach() if inference_logprobs is None else inference_logprobs
        owners = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)
        tensors = (logprobs, keep, per_token, base, ref_logprobs, owners)
        return self._stats(*tensors, num_sequences=len(targets))

    def _of_pack(
        self,
        pi_logits: Tensor,
        targets: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_masks: Tensor,
        inference_logprobs: Tensor | None,
    ) -> ChunkedLossStats:
        if advantages.dim() != 1 or len(advantages) != len(targets):
            raise InvalidInput(
                f"The advantages of a pack of {len(targets)} tokens have the shape "
                f"{tuple(advantages.shape)}.",
                reason=Reason.RAGGED,
                remedy="Give the pack's packed_advantages.",
            )
        keep = padding_masks.bool() & (targets != self.ignore_index)
        logprobs = self._logprobs(pi_logits[None, :-1], targets[None, 1:])[0]
        logprobs = torch.cat([logprobs.new_zeros(1), logprobs])
        base = logprobs.detach() if inference_logprobs is None else inference_logprobs
        # Each response begins behind a prompt, which is not kept.
        begins = keep & ~torch.nn.functional.pad(keep, (1, 0))[:-1]
        owners = begins.cumsum(0) - 1
        tensors = (logprobs, keep, advantages, base, ref_logprobs, owners)
        return self._stats(*tensors, num_sequences=int(begins.sum()))

    def _stats(  # noqa: PLR0913 - columns of the same tokens
        self,
        logprobs: Tensor,
        keep: Tensor,
        advantages: Tensor,
        base: Tensor,
        ref_logprobs: Tensor,
        owners: Tensor,
        *,
        num_sequences: int,
    ) -> ChunkedLossStats:
        inputs = LossInputs(
            policy_logprobs=logprobs[keep],
            sequence_index=owners[keep],
            loss_mask=torch.ones_like(owners[keep], dtype=torch.bool),
            num_tokens=max(1, int(keep.sum())),
            num_sequences=num_sequences,
            inference_logprobs=base[keep],
            ref_logprobs=ref_logprobs[keep],
            advantages=advantages[keep],
            aggregation="sequence",
        )
        policy_loss = losses.reinforce(inputs).loss
        kl_loss = inputs.mean(k3(inputs.policy_logprobs, inputs.require("ref_logprobs")))
        return ChunkedLossStats(
            loss=policy_loss + self.kl_coeff * kl_loss,
            policy_loss=policy_loss.detach(),
            kl_loss=kl_loss.detach(),
            ratios=inputs.token_mean(inputs.log_ratio().exp()).detach(),
            clipfrac=torch.zeros_like(policy_loss.detach()),  # nothing is clipped
            pi_logprobs=torch.where(keep, logprobs, 0.0).detach(),
        )

    def _logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log p(target) [B, T], and 0 at ignore_index."""
        pairs = zip(
            logits.chunk(self.num_output_chunks, dim=1),
            targets.chunk(self.num_output_chunks, dim=1),
            strict=True,
        )
        parts = [
            -cross_entropy(
                part.float().transpose(1, 2), ids, ignore_index=self.ignore_index, reduction="none"
            )
            for part, ids in pairs
        ]
        return torch.cat(parts, dim=1)


def _bad(message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(f"{message}.", reason=Reason.BAD_OPTIONS, remedy=remedy)
