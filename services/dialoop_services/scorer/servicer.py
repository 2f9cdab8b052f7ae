"""ScorerService over gRPC, and the scorer that it shares with the queue worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.v1 import scorer_service_pb2 as pb
from dialoop.v1.scorer_service_pb2_grpc import ScorerServiceServicer
from dialoop.wire import group_from_proto, group_to_proto, logprobs_to_proto

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    from dialoop.sequences import Floats
    from dialoop.trajectory import Group

    from dialoop_services.scorer.reference_batches import ReferenceBatches
    from dialoop_services.scorer.scoring import Scoring


class Scorer:
    """Scores up to `max_groups` groups at a time, for the queue worker and callers of the rpc."""

    def __init__(
        self, scoring: Scoring, reference: ReferenceBatches | None = None, *, max_groups: int = 16
    ) -> None:
        self._scoring = scoring
        self._reference = reference
        self._room = asyncio.Semaphore(max_groups)

    async def score(self, group: Group) -> Group:
        """Return the scored group; raise what `Scoring.score` raises."""
        async with self._room:
            return await self._scoring.score(group)

    async def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[Floats]:
        """Return for each row float32 [L - 1] under the reference model.

        Raise PreconditionFailed (NO_REFERENCE_MODEL) when there is none.
        """
        if self._reference is None:
            raise PreconditionFailed(
                "This scorer has no reference model.",
                reason=Reason.NO_REFERENCE_MODEL,
                remedy="Set DIALOOP_SCORER_MODEL_DIR.",
            )
        return await self._reference.logprobs_of_all(token_ids)


class ScorerServicer(ScorerServiceServicer):
    """Scores groups for any caller, as the queue worker does for a run."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def LogProb(
        self,
        request: pb.ScorerServiceLogProbRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceLogProbResponse:
        rows = await self._scorer.logprobs([list(row.values) for row in request.token_ids])
        return pb.ScorerServiceLogProbResponse(logprobs=logprobs_to_proto(rows))

    async def Score(
        self,
        request: pb.ScorerServiceScoreRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceScoreResponse:
        scored = await self._scorer.score(group_from_proto(request.group))
        return pb.ScorerServiceScoreResponse(group=group_to_proto(scored))
