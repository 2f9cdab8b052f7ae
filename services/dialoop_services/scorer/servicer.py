"""ScorerService over gRPC, and the scorer that it shares with the queue worker."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dialoop.errors import NotFound, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.v1 import scorer_service_pb2 as pb
from dialoop.v1.scorer_service_pb2_grpc import ScorerServiceServicer
from dialoop.wire.messages import logprobs_to_proto
from dialoop.wire.records import GROUP, TOKEN_VALUES, TRAJECTORY

from dialoop_services.config.scorer_tables import REFERENCE
from dialoop_services.scorer.trajectory_values import Scope, trajectory_kl, trajectory_logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc
    from dialoop.trajectory import Group

    from dialoop_services.scorer.reference_batches import ReferenceBatches
    from dialoop_services.scorer.scoring import Scoring

_ESTIMATORS = {pb.KL_ESTIMATOR_K2: "k2", pb.KL_ESTIMATOR_K3: "k3"}


class Scorer:
    """Scores up to `max_groups` groups at a time, for the queue worker and callers of the rpc.

    `models` are those whose log-probs may be asked for, by id; "reference" is the reference model.
    """

    def __init__(
        self,
        scoring: Scoring,
        models: Mapping[str, ReferenceBatches] = MappingProxyType({}),
        *,
        max_groups: int = 16,
    ) -> None:
        self._scoring = scoring
        self._models = models
        self._room = asyncio.Semaphore(max_groups)

    async def score(self, group: Group) -> Group:
        """Return the scored group; raise what `Scoring.score` raises."""
        async with self._room:
            return await self._scoring.score(group)

    def model(self, model_id: str = "") -> ReferenceBatches:
        """Return the model of that id, or the reference model.

        Raise NotFound (MODEL_NOT_FOUND), or PreconditionFailed (NO_REFERENCE_MODEL) when there is
        no reference model.
        """
        model_id = model_id or REFERENCE
        if model_id in self._models:
            return self._models[model_id]
        if model_id == REFERENCE:
            raise PreconditionFailed(
                "This scorer has no reference model.",
                reason=Reason.NO_REFERENCE_MODEL,
                remedy="Set DIALOOP_SCORER_MODEL_DIR.",
            )
        raise NotFound(
            f"This scorer has no model {model_id!r}; it has {', '.join(self._models) or 'none'}.",
            reason=Reason.MODEL_NOT_FOUND,
            remedy="Name one of these, or add it to `models` in [scorer].",
        )


class ScorerServicer(ScorerServiceServicer):
    """Scores groups for any caller, as the queue worker does for a run."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def LogProb(
        self,
        request: pb.ScorerServiceLogProbRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceLogProbResponse:
        model = self._scorer.model(request.model_id)
        ids = [list(row.values) for row in request.token_ids]
        rows = await model.logprobs_of_all(ids) if ids else []
        trajectories = list(map(TRAJECTORY.from_proto, request.trajectories))
        values = (
            await trajectory_logprobs(trajectories, model, _scope_of(request.mask_scope))
            if trajectories
            else []
        )
        return pb.ScorerServiceLogProbResponse(
            logprobs=logprobs_to_proto(rows), sequences=map(TOKEN_VALUES.to_proto, values)
        )

    async def RetrieveKl(
        self,
        request: pb.ScorerServiceRetrieveKlRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceRetrieveKlResponse:
        values = await trajectory_kl(
            list(map(TRAJECTORY.from_proto, request.trajectories)),
            policy=self._scorer.model(request.model_id) if request.model_id else None,
            reference=self._scorer.model(request.reference_model_id),
            scope=_scope_of(request.mask_scope),
            estimator=_ESTIMATORS.get(request.estimator, "k1"),
        )
        return pb.ScorerServiceRetrieveKlResponse(sequences=map(TOKEN_VALUES.to_proto, values))

    async def Score(
        self,
        request: pb.ScorerServiceScoreRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ScorerServiceScoreResponse:
        scored = await self._scorer.score(GROUP.from_proto(request.group))
        return pb.ScorerServiceScoreResponse(group=GROUP.to_proto(scored))


def _scope_of(scope: int) -> Scope:
    return "all" if scope == pb.TOKEN_SCOPE_ALL else "assistant"
