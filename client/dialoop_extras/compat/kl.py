"""torchrl's transforms of log-probs and KL, over clients that score token ids.

    policy, reference = dialoop.inference, dialoop.scorer     # of one `Dialoop` connection
    (row,) = await RetrieveLogProb(policy)([sequence])        # float32 [M], the sampled tokens
    (kl,) = await RetrieveKL(policy, reference)([sequence])   # float32 [M]
    env = env.with_transforms(KLRewardTransform(reference, gen_model=policy, coef=0.1))

A model is a client with `logprobs(rows)`, or such a function. Everything is in nats.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.environments.rewards.kl_reward import KLReward
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.user_functions import call

from dialoop_extras.compat.arguments import require_neutral, with_neutral

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.sequences import Floats
    from dialoop.sequences import Sequence as TokenSequence

_TIMEOUT_S = 600.0
_COLLECTED = "from_collector"


@with_neutral
@dataclass(frozen=True, slots=True)
class RetrieveLogProb:
    """Log-probs of sequences under a model.

    assistant_only: of the sampled tokens, [M]; else of all tokens but the first, [L - 1].
    """

    model: Any
    assistant_only: bool = True

    async def __call__(self, sequences: Sequence[TokenSequence]) -> list[Floats]:
        """Return one row per sequence; nothing stands for unknown values, so rows differ."""
        rows = [sequence.token_ids.tolist() for sequence in sequences]
        scored = await call(_function(self.model), rows, timeout_s=_TIMEOUT_S)
        pairs = zip(scored, sequences, strict=True)
        return [self._chosen(np.asarray(row, dtype=np.float32), s) for row, s in pairs]

    def _chosen(self, row: Floats, sequence: TokenSequence) -> Floats:
        # The log-prob of the token at position p is number p - 1.
        return row[sequence.response_mask()[1:]] if self.assistant_only else row


@with_neutral
@dataclass(frozen=True, slots=True)
class KlComputation:
    """torchrl's KLComputation: kl_t = log p_policy(t) - log p_reference(t), and -coeff * kl_t."""

    coeff: float = 1.0
    add_to_reward: bool = True

    def __call__(
        self, gen_log_probs: Floats, ref_log_probs: Floats, reward: Floats | float = 0.0
    ) -> tuple[Floats, Floats]:
        """Return the KL [M] and the dense reward [M]: `reward` less the penalty where it is added.

        Raises InvalidInput (RAGGED) for rows of different lengths.
        """
        gen, ref = np.asarray(gen_log_probs), np.asarray(ref_log_probs)
        if gen.shape != ref.shape:
            raise InvalidInput(
                f"The log-probs have shapes {gen.shape} and {ref.shape}.",
                reason=Reason.RAGGED,
                remedy="Score the same tokens with both models.",
            )
        kl = gen - ref
        penalty = self.coeff * kl if self.add_to_reward else np.zeros_like(kl)
        return kl, np.asarray(reward) - penalty


async def _collected(sequences: Sequence[TokenSequence]) -> list[Floats]:
    for number, sequence in enumerate(sequences):
        if len(sequence.inference_logprobs) != sequence.num_model_tokens:
            raise InvalidInput(
                f"Sequence {number} has no log-probs of its sampled tokens.",
                reason=Reason.RAGGED,
                remedy="Collect with a policy that returns them, or give it as gen_model.",
            )
    return [sequence.inference_logprobs for sequence in sequences]


@with_neutral
@dataclass(frozen=True, slots=True)
class RetrieveKl:
    """torchrl's RetrieveKL: the KL of sequences between two models, token by token.

    gen_model: "from_collector" takes the log-probs with which the tokens were sampled.
    """

    gen_model: Any
    ref_model: Any
    assistant_only: bool = True

    def __post_init__(self) -> None:
        if self.gen_model == _COLLECTED and not self.assistant_only:
            raise InvalidConfig(
                "Collectors record log-probs of sampled tokens alone.",
                reason=Reason.BAD_OPTIONS,
                remedy='Leave assistant_only, or give a model in place of "from_collector".',
            )

    async def __call__(self, sequences: Sequence[TokenSequence]) -> list[Floats]:
        """Return log p_gen - log p_ref per sequence, [M] or [L - 1].

        Raises InvalidInput (RAGGED) where a sequence was collected without them.
        """
        gen, ref = await asyncio.gather(
            _collected(sequences)
            if self.gen_model == _COLLECTED
            else RetrieveLogProb(self.gen_model, self.assistant_only)(sequences),
            RetrieveLogProb(self.ref_model, self.assistant_only)(sequences),
        )
        return [KlComputation()(g, r)[0] for g, r in zip(gen, ref, strict=True)]


def kl_reward_transform(
    ref_model: Any,
    *,
    gen_model: Any,
    coef: float = 1.0,
    assistant_only: bool = True,
    add_to_reward: bool = True,
    **others: Any,
) -> KLReward:
    """Return the dense reward -coef * kl for an environment in tokens mode.

    gen_model: the policy; torchrl takes its log-probs from the data instead.
    """
    require_neutral("KLRewardTransform", others)
    if not assistant_only:
        raise InvalidInput(
            "assistant_only is False, but only the policy's tokens get a reward.",
            remedy="Leave it out.",
        )
    if not add_to_reward:
        raise InvalidInput(
            "add_to_reward is False, but the transform is a reward.",
            remedy="Call RetrieveKL, which returns the KL alone.",
        )
    return KLReward(policy=_function(gen_model), reference=_function(ref_model), coefficient=coef)


def _function(model: Any) -> Any:
    return getattr(model, "logprobs", model)
