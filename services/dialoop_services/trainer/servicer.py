"""TrainerService: decode, call, encode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.clients.trainer import Phase
from dialoop.v1 import trainer_service_pb2 as pb
from dialoop.v1 import trainer_service_pb2_grpc as rpc
from dialoop.v1 import trajectory_pb2
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import POLICY_VERSION

from dialoop_services.trainer.job.evaluation import EvaluationPlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.job.job import TrainingJob
    from dialoop_services.trainer.job.status import StatusBoard
    from dialoop_services.trainer.publish.publisher import Published
    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.settings import TrainerSettings

    Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(rpc.TrainerServiceServicer):
    """The rpcs for status, published policies, and control between train steps."""

    def __init__(
        self,
        settings: TrainerSettings,
        job: TrainingJob,
        board: StatusBoard,
        records: RunRecords,
        num_parameters: int,
    ) -> None:
        self._settings = settings
        self._job = job
        self._board = board
        self._records = records
        self._num_parameters = num_parameters

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        board = self._board
        newest = board.newest
        phase = Phase.PAUSED if board.is_paused else board.phase
        return pb.GetStatusResponse(
            phase=pb.Phase.Name(int(phase)),
            policy_version=POLICY_VERSION.to_proto(newest.policy_version) if newest else None,
            num_train_steps=board.state.num_train_steps,
            max_train_steps=self._settings.num_steps,
            num_warm_start_steps=board.state.num_warm_start_steps,
            max_warm_start_steps=self._settings.warm_start.num_steps,
            metrics=self._records.newest,
            failure=board.failure,
            num_parameters=self._num_parameters,
            alarms=sorted(board.alarms),
        )

    async def WatchPolicy(
        self, request: pb.WatchPolicyRequest, context: Context
    ) -> AsyncIterator[pb.WatchPolicyResponse]:
        async for published in self._board.publishes():
            yield _watch_response(published, self._settings)

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        published = await self._job.publish()
        return pb.PublishResponse(
            policy_version=POLICY_VERSION.to_proto(published.policy_version),
            publish_s=published.publish_s,
            max_logprob_difference=published.max_logprob_difference,
        )

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointResponse:
        path = await self._job.checkpoint()
        return pb.CheckpointResponse(
            path=str(path), num_train_steps=self._board.state.num_train_steps
        )

    async def Pause(
        self, request: pb.TrainerServicePauseRequest, context: Context
    ) -> pb.TrainerServicePauseResponse:
        self._board.pause()
        return pb.TrainerServicePauseResponse()

    async def Resume(
        self, request: pb.TrainerServiceResumeRequest, context: Context
    ) -> pb.TrainerServiceResumeResponse:
        self._board.resume()
        return pb.TrainerServiceResumeResponse()

    async def Evaluate(self, request: pb.EvaluateRequest, context: Context) -> pb.EvaluateResponse:
        result = await self._job.evaluate(
            EvaluationPlan(
                environment=request.environment or self._settings.environment.served_name,
                split=request.split or self._settings.environment.heldout_split,
                num_tasks=request.max_tasks or 1_000_000,
                sampling=SAMPLING.from_proto(request.sampling),
                label=request.label or "on_request",
                num_trajectories=request.num_trajectories or 1,
            )
        )
        return pb.EvaluateResponse(
            mean_reward=result.mean_reward,
            tool_call_rate=result.tool_call_rate,
            num_trajectories=result.num_trajectories,
            num_failed=result.num_failed,
            accuracy=result.accuracy,
            share=result.share,
            oldest_policy_version=_version(result.oldest),
            newest_policy_version=_version(result.newest),
        )


def _version(version: PolicyVersion | None) -> trajectory_pb2.PolicyVersion | None:
    return None if version is None else POLICY_VERSION.to_proto(version)


def _watch_response(published: Published, settings: TrainerSettings) -> pb.WatchPolicyResponse:
    weights = published.weights
    return pb.WatchPolicyResponse(
        policy_version=POLICY_VERSION.to_proto(published.policy_version),
        weights=pb.WeightsLocation(
            path=str(weights.path.relative_to(settings.run_dir / "policies")),
            sha256=weights.sha256,
            num_bytes=weights.num_bytes,
            kind=int(weights.kind),  # type: ignore[arg-type]  # enums are ints
            base_digest=weights.base_digest,
        ),
    )
