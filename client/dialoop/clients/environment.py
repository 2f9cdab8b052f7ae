"""EnvironmentClient: environments, tasks, sessions and episodes, in domain types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Rpc
from dialoop.clients.errors import error_of_item
from dialoop.environments.episode import Score
from dialoop.environments.tasks import TaskPage, TaskRef
from dialoop.episode import Opening, Outcome
from dialoop.trajectory import DoneReason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire import (
    chat_history_from_proto,
    chat_history_to_proto,
    failure_from_proto,
    reward_from_proto,
    trajectory_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.chat import ChatHistory
    from dialoop.clients.channel import Channel
    from dialoop.errors import DialoopError
    from dialoop.trajectory import Trajectory


__all__ = [
    "EnvironmentClient",
    "EnvironmentInfo",
    "ResetItem",
    "SessionState",
    "SplitInfo",
    "StepItem",
    "TaskPage",
    "TaskRef",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """A named set of tasks: `SplitInfo(name="train", num_tasks=10000)`."""

    name: str
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """What a client needs to know of an environment before it plays."""

    name: str
    version: str
    description: str = ""
    splits: tuple[SplitInfo, ...] = ()
    max_turns: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    reward_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetItem:
    """One reset of a batch."""

    session_id: str
    episode: int
    split: str
    task_key: str
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One step of a batch."""

    session_id: str
    episode: int
    step_index: int
    history: ChatHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """Where a session stands; `history` is what the next step continues."""

    session_id: str
    environment: str
    episode: int
    next_step_index: int
    done: bool
    history: ChatHistory
    expires_in_s: float


def _rpc(name: str, request: type[Any], answer: type[Any], **options: Any) -> Rpc[Any, Any]:
    # All are safe to repeat: sessions have the caller's id, and a step carries its index.
    path = f"/dialoop.v1.EnvironmentService/{name}"
    return Rpc(path, request, answer, is_retried=True, **options)


LIST_ENVIRONMENTS = _rpc(
    "ListEnvironments", pb.ListEnvironmentsRequest, pb.ListEnvironmentsResponse
)
GET_ENVIRONMENT = _rpc("GetEnvironment", pb.GetEnvironmentRequest, pb.GetEnvironmentResponse)
LIST_TASKS = _rpc("ListTasks", pb.ListTasksRequest, pb.ListTasksResponse)
CREATE_SESSION = _rpc("CreateSession", pb.CreateSessionRequest, pb.CreateSessionResponse)
RESET = _rpc("Reset", pb.ResetRequest, pb.ResetResponse)
STEP = _rpc("Step", pb.StepRequest, pb.StepResponse)
STEP_AND_RESET = _rpc("StepAndReset", pb.StepAndResetRequest, pb.StepAndResetResponse)
BATCH_RESET = _rpc("BatchReset", pb.BatchResetRequest, pb.BatchResetResponse, deadline_s=300.0)
BATCH_STEP = _rpc("BatchStep", pb.BatchStepRequest, pb.BatchStepResponse, deadline_s=300.0)
GET_SESSION = _rpc("GetSession", pb.GetSessionRequest, pb.GetSessionResponse)
CLOSE_SESSION = _rpc("CloseSession", pb.CloseSessionRequest, pb.CloseSessionResponse)
SCORE = _rpc("Score", pb.ScoreRequest, pb.ScoreResponse)


class EnvironmentClient:
    """Plays episodes on an environment service; satisfies `dialoop.episode.Sessions`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """All environments the service has."""
        answer = await self._channel.call(LIST_ENVIRONMENTS, pb.ListEnvironmentsRequest())
        return tuple(_info_from_proto(info) for info in answer.environments)

    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """One environment; NotFound (ENVIRONMENT_NOT_FOUND) when there is none of that name."""
        request = pb.GetEnvironmentRequest(environment=environment)
        return _info_from_proto((await self._channel.call(GET_ENVIRONMENT, request)).environment)

    async def list_tasks(
        self,
        environment: str,
        *,
        split: str,
        page_size: int = 100,
        page_token: str = "",
        one_epoch: bool = False,
        shuffle_seed: int = 0,
    ) -> TaskPage:
        """One page of tasks; pages run on through epochs unless `one_epoch`."""
        request = pb.ListTasksRequest(
            environment=environment,
            split=split,
            page_size=page_size,
            page_token=page_token,
            one_epoch=one_epoch,
            shuffle_seed=shuffle_seed,
        )
        answer = await self._channel.call(LIST_TASKS, request)
        tasks = (TaskRef(key=t.key, epoch=t.epoch, seed=t.seed) for t in answer.tasks)
        return TaskPage(tasks=tuple(tasks), next_page_token=answer.next_page_token)

    async def create_session(
        self, session_id: str, environment: str, *, ttl_s: float | None = None
    ) -> float:
        """Open a session under the caller's id; its time to live in seconds."""
        request = pb.CreateSessionRequest(
            session_id=session_id, environment=environment, ttl_s=ttl_s
        )
        return float((await self._channel.call(CREATE_SESSION, request)).ttl_s)

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> Opening:
        """Start an episode of the session."""
        item = ResetItem(
            session_id=session_id, episode=episode, split=split, task_key=task_key, seed=seed
        )
        return opening_from_proto(await self._channel.call(RESET, reset_to_proto(item)))

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> Outcome:
        """Take the policy's answer; a retry gets the first answer."""
        item = StepItem(
            session_id=session_id, episode=episode, step_index=step_index, history=history
        )
        return outcome_from_proto(await self._channel.call(STEP, step_to_proto(item)))

    async def step_and_reset(
        self, item: StepItem, *, next_split: str, next_task_key: str, next_seed: int = 0
    ) -> tuple[Outcome, Opening | None]:
        """Step, and where that ends the episode open the next one in the same session."""
        request = pb.StepAndResetRequest(
            step=step_to_proto(item),
            next_split=next_split,
            next_task_key=next_task_key,
            next_seed=next_seed,
        )
        answer = await self._channel.call(STEP_AND_RESET, request)
        opening = opening_from_proto(answer.reset) if answer.HasField("reset") else None
        return outcome_from_proto(answer.step), opening

    async def batch_reset(self, items: Iterable[ResetItem]) -> tuple[Opening | DialoopError, ...]:
        """Reset many sessions; an item that failed is its error, the others are unharmed."""
        request = pb.BatchResetRequest(items=[reset_to_proto(item) for item in items])
        answer = await self._channel.call(BATCH_RESET, request)
        return tuple(
            error_of_item(item.error)
            if item.HasField("error")
            else opening_from_proto(item.response)
            for item in answer.items
        )

    async def batch_step(self, items: Iterable[StepItem]) -> tuple[Outcome | DialoopError, ...]:
        """Step many sessions; an item that failed is its error, the others are unharmed."""
        request = pb.BatchStepRequest(items=[step_to_proto(item) for item in items])
        answer = await self._channel.call(BATCH_STEP, request)
        return tuple(
            error_of_item(item.error)
            if item.HasField("error")
            else outcome_from_proto(item.response)
            for item in answer.items
        )

    async def get_session(self, session_id: str) -> SessionState:
        """Where the session stands; NotFound (SESSION_LOST, SESSION_EXPIRED) when it is gone."""
        answer = await self._channel.call(GET_SESSION, pb.GetSessionRequest(session_id=session_id))
        return SessionState(
            session_id=answer.session_id,
            environment=answer.environment,
            episode=answer.episode,
            next_step_index=answer.next_step_index,
            done=answer.done,
            history=chat_history_from_proto(answer.history),
            expires_in_s=answer.expires_in_s,
        )

    async def close_session(self, session_id: str) -> bool:
        """Forget the session; whether there was one."""
        request = pb.CloseSessionRequest(session_id=session_id)
        return bool((await self._channel.call(CLOSE_SESSION, request)).closed)

    async def score(self, trajectory: Trajectory, *, split: str) -> tuple[Score, ...]:
        """Recompute a finished trajectory's rewards: one score per turn, with what failed."""
        request = pb.ScoreRequest(split=split, trajectory=trajectory_to_proto(trajectory))
        answer = await self._channel.call(SCORE, request)
        return tuple(
            Score(
                rewards=tuple(reward_from_proto(reward) for reward in turn.rewards),
                failures=tuple(failure_from_proto(failure) for failure in turn.failures),
            )
            for turn in answer.turns
        )


def _info_from_proto(proto: pb.EnvironmentInfo) -> EnvironmentInfo:
    return EnvironmentInfo(
        name=proto.name,
        version=proto.version,
        description=proto.description,
        splits=tuple(SplitInfo(name=s.name, num_tasks=s.num_tasks) for s in proto.splits),
        max_turns=proto.max_turns,
        stop=tuple(proto.stop),
        tools=tuple(proto.tools),
        reward_names=tuple(proto.reward_names),
    )


def reset_to_proto(item: ResetItem) -> pb.ResetRequest:
    """A reset's request."""
    return pb.ResetRequest(
        session_id=item.session_id,
        episode=item.episode,
        split=item.split,
        task_key=item.task_key,
        seed=item.seed,
    )


def step_to_proto(item: StepItem) -> pb.StepRequest:
    """A step's request."""
    return pb.StepRequest(
        session_id=item.session_id,
        episode=item.episode,
        step_index=item.step_index,
        history=chat_history_to_proto(item.history),
    )


def opening_from_proto(proto: pb.ResetResponse) -> Opening:
    """A reset's answer."""
    return Opening(
        history=chat_history_from_proto(proto.history),
        info=dict(proto.info),
        environment_version=proto.environment_version,
    )


def outcome_from_proto(proto: pb.StepResponse) -> Outcome:
    """A step's answer."""
    return Outcome(
        history=chat_history_from_proto(proto.history),
        rewards=tuple(reward_from_proto(r) for r in proto.rewards),
        terminated=proto.terminated,
        truncated=proto.truncated,
        done_reason=DoneReason(proto.done_reason or DoneReason.NOT_DONE),
        failures=tuple(failure_from_proto(f) for f in proto.failures),
        num_tool_calls=proto.num_tool_calls,
        replayed=proto.replayed,
    )
