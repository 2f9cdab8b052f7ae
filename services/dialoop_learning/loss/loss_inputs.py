"""What a loss reads and what it returns.

Every aggregation gives each token a weight. Its denominators count the whole update before any
mask, so the losses and metrics of several packed rows (and ranks) add up to those of one big row.
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
