"""TrainerClient: the state of training, its published policies, and its controls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from dialoop.clients.channel import Channel, rpc_of
from dialoop.clients.weights import WeightsKind
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop.v1 import trainer_service_pb2 as pb
from dialoop.wire.codec import Codec, enum, submessage
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import POLICY_VERSION


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
    policy_version: PolicyVersion | None = None
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
    """The outcome of an evaluation and the policy versions that played it.

    Means are over the `num_trajectories` episodes that count, which are `share` of all.
    `accuracy`: the share of successes; None unless the rewards of each say whether it is one.
    """

    mean_reward: float
    accuracy: float | None = None
    tool_call_rate: float
    num_trajectories: int
    num_failed: int
    share: float
    oldest_policy_version: PolicyVersion
    newest_policy_version: PolicyVersion


_VERSION = submessage(POLICY_VERSION)
_STATUS = Codec(
    TrainerStatus,
    pb.GetStatusResponse,
    phase=enum(Phase, unspecified=Phase.STARTING),
    policy_version=_VERSION,
)
_PUBLICATION = Codec(Publication, pb.PublishResponse, policy_version=_VERSION)
_CHECKPOINT = Codec(SavedCheckpoint, pb.CheckpointResponse)
_EVALUATION = Codec(
    Evaluation,
    pb.EvaluateResponse,
    oldest_policy_version=_VERSION,
    newest_policy_version=_VERSION,
)

_rpc = partial(rpc_of, pb, "TrainerService")
GET_STATUS = _rpc("GetStatus", is_retried=True)
WATCH_POLICY = _rpc("WatchPolicy")
PUBLISH = _rpc("Publish", deadline_s=600.0)
CHECKPOINT = _rpc("Checkpoint", deadline_s=600.0)
PAUSE = _rpc("Pause", is_retried=True)
RESUME = _rpc("Resume", is_retried=True)
EVALUATE = _rpc("Evaluate", deadline_s=3600.0)


class TrainerClient:
    """Asks one trainer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def get_status(self) -> TrainerStatus:
        """Return how far training is."""
        return _STATUS.from_proto(await self._channel.call(GET_STATUS, pb.GetStatusRequest()))

    async def watch_policy(self) -> AsyncIterator[PublishedPolicy]:
        """Yield the current policy at once, then every publish."""
        async for answer in self._channel.stream(WATCH_POLICY, pb.WatchPolicyRequest()):
            yield PublishedPolicy(
                policy_version=POLICY_VERSION.from_proto(answer.policy_version),
                path=answer.weights.path,
                sha256=answer.weights.sha256,
                num_bytes=answer.weights.num_bytes,
                kind=WeightsKind(answer.weights.kind or WeightsKind.WHOLE),
                base_digest=answer.weights.base_digest,
            )

    async def publish(self) -> Publication:
        """Publish the current weights now."""
        return _PUBLICATION.from_proto(await self._channel.call(PUBLISH, pb.PublishRequest()))

    async def checkpoint(self) -> SavedCheckpoint:
        """Write a checkpoint now."""
        return _CHECKPOINT.from_proto(await self._channel.call(CHECKPOINT, pb.CheckpointRequest()))

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
            sampling=SAMPLING.to_proto(sampling or SamplingParams()),
            num_trajectories=num_trajectories,
            label=label,
        )
        return _EVALUATION.from_proto(await self._channel.call(EVALUATE, request))
