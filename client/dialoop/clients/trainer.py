"""TrainerClient: the state of training, its published policies, and its controls."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Rpc
from dialoop.clients.weights import WeightsKind
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop.v1 import trainer_service_pb2 as pb
from dialoop.wire import policy_version_from_proto, sampling_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop.clients.channel import Channel


class Phase(IntEnum):
    """What the trainer is doing."""

    STARTING = 1
    WARM_START = 2
    TRAINING = 3
    EVALUATING = 4
    PAUSED = 5
    DONE = 6
    FAILED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """How far training is; `metrics` holds the newest value of each."""

    phase: Phase
    policy_version: PolicyVersion | None
    num_train_steps: int
    max_train_steps: int
    num_warm_start_steps: int
    max_warm_start_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    num_parameters: int = 0
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A published policy and where its weights lie, for a replica that starts late.

    Of kind ADAPTER it is the base weights of `base_digest` with the adapter at `path` added in.
    """

    policy_version: PolicyVersion
    path: str
    sha256: str
    num_bytes: int
    kind: WeightsKind = WeightsKind.WHOLE
    base_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A publish that succeeded; the difference is the largest one on the probe prompts."""

    policy_version: PolicyVersion
    publish_s: float
    max_logprob_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """Where the checkpoint lies."""

    path: str
    num_train_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation and the policy versions that played it."""

    mean_reward: float
    tool_call_rate: float
    num_trajectories: int
    num_failed: int
    oldest_policy_version: PolicyVersion
    newest_policy_version: PolicyVersion


def _rpc(name: str, request: type[Any], answer: type[Any], **options: Any) -> Rpc[Any, Any]:
    return Rpc(f"/dialoop.v1.TrainerService/{name}", request, answer, **options)


GET_STATUS = _rpc("GetStatus", pb.GetStatusRequest, pb.GetStatusResponse, is_retried=True)
WATCH_POLICY = _rpc("WatchPolicy", pb.WatchPolicyRequest, pb.WatchPolicyResponse)
PUBLISH = _rpc("Publish", pb.PublishRequest, pb.PublishResponse, deadline_s=600.0)
CHECKPOINT = _rpc("Checkpoint", pb.CheckpointRequest, pb.CheckpointResponse, deadline_s=600.0)
PAUSE = _rpc(
    "Pause", pb.TrainerServicePauseRequest, pb.TrainerServicePauseResponse, is_retried=True
)
RESUME = _rpc(
    "Resume", pb.TrainerServiceResumeRequest, pb.TrainerServiceResumeResponse, is_retried=True
)
EVALUATE = _rpc("Evaluate", pb.EvaluateRequest, pb.EvaluateResponse, deadline_s=3600.0)


class TrainerClient:
    """Asks one trainer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def get_status(self) -> TrainerStatus:
        """Return how far training is."""
        answer = await self._channel.call(GET_STATUS, pb.GetStatusRequest())
        version = answer.policy_version if answer.HasField("policy_version") else None
        return TrainerStatus(
            phase=Phase(answer.phase or Phase.STARTING),
            policy_version=None if version is None else policy_version_from_proto(version),
            num_train_steps=answer.num_train_steps,
            max_train_steps=answer.max_train_steps,
            num_warm_start_steps=answer.num_warm_start_steps,
            max_warm_start_steps=answer.max_warm_start_steps,
            metrics=dict(answer.metrics),
            failure=answer.failure,
            num_parameters=answer.num_parameters,
            alarms=tuple(answer.alarms),
        )

    async def watch_policy(self) -> AsyncIterator[PublishedPolicy]:
        """Yield the current policy at once, then every publish."""
        async for answer in self._channel.stream(WATCH_POLICY, pb.WatchPolicyRequest()):
            yield PublishedPolicy(
                policy_version=policy_version_from_proto(answer.policy_version),
                path=answer.weights.path,
                sha256=answer.weights.sha256,
                num_bytes=answer.weights.num_bytes,
                kind=WeightsKind(answer.weights.kind or WeightsKind.WHOLE),
                base_digest=answer.weights.base_digest,
            )

    async def publish(self) -> Publication:
        """Publish the current weights now."""
        answer = await self._channel.call(PUBLISH, pb.PublishRequest())
        return Publication(
            policy_version=policy_version_from_proto(answer.policy_version),
            publish_s=answer.publish_s,
            max_logprob_difference=answer.max_logprob_difference,
        )

    async def checkpoint(self) -> SavedCheckpoint:
        """Write a checkpoint now."""
        answer = await self._channel.call(CHECKPOINT, pb.CheckpointRequest())
        return SavedCheckpoint(path=answer.path, num_train_steps=answer.num_train_steps)

    async def pause(self) -> None:
        """Pause before the next train step."""
        await self._channel.call(PAUSE, pb.TrainerServicePauseRequest())

    async def resume(self) -> None:
        """Resume training."""
        await self._channel.call(RESUME, pb.TrainerServiceResumeRequest())

    async def evaluate(
        self,
        environment: str,
        *,
        split: str,
        max_tasks: int = 0,
        sampling: SamplingParams | None = None,
        num_trajectories: int = 1,
        label: str = "",
    ) -> Evaluation:
        """Play the split's tasks (all when `max_tasks` is 0) and average their rewards."""
        request = pb.EvaluateRequest(
            environment=environment,
            split=split,
            max_tasks=max_tasks,
            sampling=sampling_to_proto(sampling or SamplingParams()),
            num_trajectories=num_trajectories,
            label=label,
        )
        answer = await self._channel.call(EVALUATE, request)
        return Evaluation(
            mean_reward=answer.mean_reward,
            tool_call_rate=answer.tool_call_rate,
            num_trajectories=answer.num_trajectories,
            num_failed=answer.num_failed,
            oldest_policy_version=policy_version_from_proto(answer.oldest_policy_version),
            newest_policy_version=policy_version_from_proto(answer.newest_policy_version),
        )
