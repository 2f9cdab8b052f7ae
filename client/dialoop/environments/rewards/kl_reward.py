"""A penalty for drift from the reference model: minus the log-prob difference per token.

    # dialoop: a `Dialoop` connection
    KLReward(policy=dialoop.inference.logprobs, reference=dialoop.scorer.logprobs, coefficient=0.1)

kl_t = log p_policy(t) - log p_reference(t); the reward of token t is -coefficient * kl_t.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dialoop.environments.episode import Episode, Score
from dialoop.environments.modes import RewardShape
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.sequences import Source
from dialoop.trajectory import Reward
from dialoop.user_functions import call


class LogProbFunction(Protocol):
    """A function of rows of ids: L - 1 log-probs in nats for a row of L ids, from its second on.

    `ScorerClient.logprobs` and `InferenceClient.logprobs` are such functions. It may be async.
    """

    def __call__(self, rows: list[list[int]]) -> Sequence[Any] | Awaitable[Sequence[Any]]:
        """Return one list of numbers per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLReward(Transform):
    """A reward for each token of each response. It needs tokens mode, which has the ids."""

    policy: LogProbFunction
    reference: LogProbFunction
    coefficient: float = 1.0
    name: str = "kl"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.coefficient) or self.timeout_s <= 0:
            raise InvalidConfig(
                "coefficient or timeout_s of KLReward is out of range.",
                remedy="Give finite numbers, and a time above 0.",
            )

    @property
    def traits(self) -> Traits:
        """Return that its reward is dense and reads tokens."""
        return Traits(reward_names=(self.name,), reward_shape=RewardShape.DENSE, needs_tokens=True)

    async def score(self, episode: Episode) -> Score:
        """Return the reward of the last response; raise if a model does not answer."""
        from dialoop.environments.views import TokensView

        if not isinstance(episode.view, TokensView):
            raise ValueError("the episode has no tokens")
        sequence = episode.view.sequence
        segments = [s for s in sequence.segments if s.source is Source.MODEL]
        last = [s for s in segments if s.turn == segments[-1].turn]
        row = sequence.token_ids[: last[-1].end].tolist()
        (policy,), (reference,) = await asyncio.gather(
            call(self.policy, [row], timeout_s=self.timeout_s),
            call(self.reference, [row], timeout_s=self.timeout_s),
        )
        if not len(policy) == len(reference) == len(row) - 1:
            raise ValueError("a model returned a wrong number of log-probs")
        # The log-prob of the token at position p is number p - 1.
        per_token = [
            -self.coefficient * (float(policy[p - 1]) - float(reference[p - 1]))
            for segment in last
            for p in range(segment.start, segment.end)
        ]
        return Score(rewards=(Reward.dense(self.name, per_token),))
