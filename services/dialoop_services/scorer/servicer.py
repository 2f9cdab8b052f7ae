"""ScorerService over gRPC: decode, call, encode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.v1 import scorer_service_pb2 as pb
from dialoop.v1.scorer_service_pb2_grpc import ScorerServiceServicer
from dialoop.wire import group_from_proto, group_to_proto, logprobs_to_proto

if TYPE_CHECKING:
    import grpc

    from dialoop_services.scorer.desk import Desk


class ScorerServicer(ScorerServiceServicer):
    """What the queue worker does, for anyone who asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def LogProb(
        self,
        request: pb.ScorerServiceLogProbRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceLogProbResponse:
        rows = await self._desk.logprobs([list(row.values) for row in request.token_ids])
        return pb.ScorerServiceLogProbResponse(logprobs=logprobs_to_proto(rows))

    async def Score(
        self,
        request: pb.ScorerServiceScoreRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceScoreResponse:
        scored = await self._desk.score(group_from_proto(request.group))
        return pb.ScorerServiceScoreResponse(group=group_to_proto(scored))
