"""ScorerClient: reference log-probs and scored groups, in domain types."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

from dialoop.clients.channel import Channel, rpc_of
from dialoop.clients.inference import PolicyLogProbs
from dialoop.sequences import TokenValues
from dialoop.trajectory import Group, Trajectory
from dialoop.v1 import scorer_service_pb2 as pb
from dialoop.wire.messages import logprobs_from_proto, token_ids_to_proto
from dialoop.wire.records import GROUP, TOKEN_VALUES, TRAJECTORY

_rpc = partial(rpc_of, pb, "ScorerService", is_retried=True, deadline_s=600.0)
LOG_PROB = _rpc("LogProb")
RETRIEVE_KL = _rpc("RetrieveKl")
SCORE = _rpc("Score")


class ScorerClient:
    """Asks one scorer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def logprobs(
        self, rows: Iterable[Iterable[int]], *, model_id: str = ""
    ) -> PolicyLogProbs:
        """Return log-probs of token ids under the reference model, or the one called `model_id`."""
        request = pb.ScorerServiceLogProbRequest(
            token_ids=token_ids_to_proto(rows), model_id=model_id
        )
        answer = await self._channel.call(LOG_PROB, request)
        return PolicyLogProbs(logprobs=logprobs_from_proto(answer.logprobs))

    async def logprobs_of(
        self,
        trajectories: Iterable[Trajectory],
        *,
        mask_scope: Literal["assistant", "all"] = "assistant",
        model_id: str = "",
    ) -> tuple[TokenValues, ...]:
        """Return log-probs in nats of trajectories' tokens, at their sampling temperature.

        There is one TokenValues for each sequence, with the tokens that the policy sampled or, with
        the scope "all", all but the first.
        """
        request = pb.ScorerServiceLogProbRequest(
            trajectories=map(TRAJECTORY.to_proto, trajectories),
            mask_scope=f"TOKEN_SCOPE_{mask_scope.upper()}",
            model_id=model_id,
        )
        answer = await self._channel.call(LOG_PROB, request)
        return tuple(map(TOKEN_VALUES.from_proto, answer.sequences))

    async def kl(
        self,
        trajectories: Iterable[Trajectory],
        *,
        estimator: Literal["k1", "k2", "k3"] = "k1",
        mask_scope: Literal["assistant", "all"] = "assistant",
        model_id: str = "",
        reference_model_id: str = "",
    ) -> tuple[TokenValues, ...]:
        """Return the KL to the reference model in nats, token by token, for each sequence.

        It is of the policy that sampled or, with a `model_id`, of that model. k1 is
        log policy - log reference.
        """
        request = pb.ScorerServiceRetrieveKlRequest(
            trajectories=map(TRAJECTORY.to_proto, trajectories),
            mask_scope=f"TOKEN_SCOPE_{mask_scope.upper()}",
            model_id=model_id,
            reference_model_id=reference_model_id,
            estimator=f"KL_ESTIMATOR_{estimator.upper()}",
        )
        answer = await self._channel.call(RETRIEVE_KL, request)
        return tuple(map(TOKEN_VALUES.from_proto, answer.sequences))

    async def score(self, group: Group) -> Group:
        """Score a group: return it with rewards, reference log-probs and advantages."""
        request = pb.ScorerServiceScoreRequest(group=GROUP.to_proto(group))
        return GROUP.from_proto((await self._channel.call(SCORE, request)).group)
