"""ScorerClient: reference log-probs and scored groups, in domain types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Rpc
from dialoop.clients.inference import PolicyLogProbs
from dialoop.v1 import scorer_service_pb2 as pb
from dialoop.wire import group_from_proto, group_to_proto, logprobs_from_proto, token_ids_to_proto

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.clients.channel import Channel
    from dialoop.trajectory import Group

LOG_PROB: Rpc[Any, Any] = Rpc(
    "/dialoop.v1.ScorerService/LogProb",
    pb.ScorerServiceLogProbRequest,
    pb.ScorerServiceLogProbResponse,
    is_retried=True,
    deadline_s=600.0,
)
SCORE: Rpc[Any, Any] = Rpc(
    "/dialoop.v1.ScorerService/Score",
    pb.ScorerServiceScoreRequest,
    pb.ScorerServiceScoreResponse,
    is_retried=True,
    deadline_s=600.0,
)


class ScorerClient:
    """Asks one scorer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def logprobs(self, rows: Iterable[Iterable[int]]) -> PolicyLogProbs:
        """Return log-probs of token ids under the reference model."""
        request = pb.ScorerServiceLogProbRequest(token_ids=token_ids_to_proto(rows))
        answer = await self._channel.call(LOG_PROB, request)
        return PolicyLogProbs(logprobs=logprobs_from_proto(answer.logprobs))

    async def score(self, group: Group) -> Group:
        """Score a group: return it with rewards, reference log-probs and advantages."""
        request = pb.ScorerServiceScoreRequest(group=group_to_proto(group))
        return group_from_proto((await self._channel.call(SCORE, request)).group)
