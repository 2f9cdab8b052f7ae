"""EnvironmentClient: environments, tasks, sessions and episodes, in domain types."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from dialoop.chat import ChatHistory
from dialoop.clients.channel import A, Channel, Q, Rpc, rpc_of
from dialoop.clients.environment_records import (
    CHOICE,
    INFO,
    RESET_ITEM,
    RESET_RESULT,
    SESSION_STATE,
    TASK_PAGE,
    TURN_SCORE,
    EnvironmentInfo,
    ResetItem,
    SplitInfo,
    StepItem,
    step_result_from_proto,
    step_to_proto,
)
from dialoop.clients.errors import error_of_item, require_count
from dialoop.environments.environment import Given
from dialoop.environments.episode import Score
from dialoop.environments.modes import Answered
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.environments.tasks.source import TaskPage, TaskRef
from dialoop.episode import GroupOpening, ResetResult, Resumed, SessionState, StepResult
from dialoop.errors import DialoopError
from dialoop.trajectory import Trajectory
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire.messages import CHAT_HISTORY
from dialoop.wire.records import TRAJECTORY

__all__ = [
    "EnvironmentClient",
    "EnvironmentInfo",
    "GroupOpening",
    "ResetItem",
    "SessionState",
    "SplitInfo",
    "StepItem",
    "TaskPage",
    "TaskRef",
]


# All but STEP_HISTORY are safe to repeat: sessions have the caller's id, and a step its index.
_rpc = partial(rpc_of, pb, "EnvironmentService", is_retried=True)
LIST_ENVIRONMENTS = _rpc("ListEnvironments")
GET_ENVIRONMENT = _rpc("GetEnvironment")
LIST_TASKS = _rpc("ListTasks")
CREATE_SESSION = _rpc("CreateSession")
# The service limits what an environment does by its step_timeout_s, so these have no deadline here.
RESET = _rpc("Reset", deadline_s=math.inf)
STEP = _rpc("Step", deadline_s=math.inf)
STEP_AND_RESET = _rpc("StepAndReset", deadline_s=math.inf)
BATCH_RESET = _rpc("BatchReset", deadline_s=math.inf)
BATCH_STEP = _rpc("BatchStep", deadline_s=math.inf)
# Not safe to repeat: no session keeps the first answer.
STEP_HISTORY = _rpc("StepHistory", is_retried=False)
CREATE_GROUP = _rpc("CreateGroup", deadline_s=math.inf)
GET_SESSION = _rpc("GetSession")
CLOSE_SESSION = _rpc("CloseSession")
SCORE = _rpc("Score")


class EnvironmentClient:
    """Plays episodes on an environment service; satisfies `dialoop.episode.Sessions`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def _call(self, rpc: Rpc[Q, A], request: Q) -> A:
        return await self._channel.call(rpc, request)

    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """Return all environments the service has."""
        answer = await self._call(LIST_ENVIRONMENTS, pb.ListEnvironmentsRequest())
        return tuple(INFO.from_proto(info) for info in answer.environments)

    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """Describe an environment; NotFound (ENVIRONMENT_NOT_FOUND) where none has that name."""
        request = pb.GetEnvironmentRequest(environment=environment)
        return INFO.from_proto((await self._call(GET_ENVIRONMENT, request)).environment)

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
        """Return one page of tasks; pages run on through epochs unless `one_epoch`."""
        request = pb.ListTasksRequest(
            environment=environment,
            split=split,
            page_size=page_size,
            page_token=page_token,
            one_epoch=one_epoch,
            shuffle_seed=shuffle_seed,
        )
        return TASK_PAGE.from_proto(await self._call(LIST_TASKS, request))

    async def create_session(
        self, session_id: str, environment: str, *, ttl_s: float | None = None
    ) -> float:
        """Open a session under the caller's id; return its time to live in seconds."""
        request = pb.CreateSessionRequest(
            session_id=session_id, environment=environment, ttl_s=ttl_s
        )
        return float((await self._call(CREATE_SESSION, request)).ttl_s)

    async def reset(  # noqa: PLR0913 - the request has as many fields
        self,
        session_id: str,
        *,
        episode: int,
        split: str = "",
        task_key: str = "",
        seed: int = 0,
        question: Given | None = None,
        resumed: Resumed | None = None,
    ) -> ResetResult:
        """Start an episode of the session: with a task, or with the caller's `question`.

        One that is `resumed` goes on from a snapshot; PreconditionFailed (SNAPSHOT_TORN).
        """
        item = ResetItem(
            session_id=session_id,
            episode=episode,
            split=split,
            task_key=task_key,
            seed=seed,
            question=question or Given(),
            resumed=resumed,
        )
        return RESET_RESULT.from_proto(await self._call(RESET, RESET_ITEM.to_proto(item)))

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: Answered
    ) -> StepResult:
        """Step with the policy's answer; a retry gets the first result.

        `history` is a ChatHistory, or Text or Tokens where that is the environment's input mode.
        What it has of the prompt must be the session's (HISTORY_REWRITTEN): of two clients of one
        session the one who is behind asks `get_session`.
        """
        item = StepItem(
            session_id=session_id, episode=episode, step_index=step_index, history=history
        )
        return step_result_from_proto(await self._call(STEP, step_to_proto(item)), history)

    async def step_and_reset(
        self, item: StepItem, *, next_split: str, next_task_key: str, next_seed: int = 0
    ) -> tuple[StepResult, ResetResult | None]:
        """Step, and where that ends the episode open the next one in the same session."""
        request = pb.StepAndResetRequest(
            step=step_to_proto(item),
            next_split=next_split,
            next_task_key=next_task_key,
            next_seed=next_seed,
        )
        answer = await self._call(STEP_AND_RESET, request)
        opening = RESET_RESULT.from_proto(answer.reset) if answer.HasField("reset") else None
        return step_result_from_proto(answer.step, item.history), opening

    async def batch_reset(
        self, items: Iterable[ResetItem]
    ) -> tuple[ResetResult | DialoopError, ...]:
        """Reset many sessions; an item that failed is its error, the others are unharmed."""
        items = list(items)
        request = pb.BatchResetRequest(items=[RESET_ITEM.to_proto(item) for item in items])
        answer = await self._call(BATCH_RESET, request)
        require_count(len(answer.items), len(items), "resets")
        return tuple(
            error_of_item(reset.error)
            if reset.HasField("error")
            else RESET_RESULT.from_proto(reset.response)
            for reset in answer.items
        )

    async def batch_step(self, items: Iterable[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        """Step many sessions; an item that failed is its error, the others are unharmed."""
        items = list(items)
        request = pb.BatchStepRequest(items=[step_to_proto(item) for item in items])
        answer = await self._call(BATCH_STEP, request)
        require_count(len(answer.items), len(items), "steps")
        return tuple(
            error_of_item(step.error)
            if step.HasField("error")
            else step_result_from_proto(step.response, item.history)
            for item, step in zip(items, answer.items, strict=True)
        )

    async def step_history(
        self, environment: str, choice: TaskChoice, history: ChatHistory
    ) -> StepResult:
        """Step without a session, from the whole history; a retry runs its tools again."""
        request = pb.StepHistoryRequest(
            environment=environment,
            task=CHOICE.to_proto(choice),
            history=CHAT_HISTORY.to_proto(history),
        )
        answer = await self._call(STEP_HISTORY, request)
        return step_result_from_proto(answer.step, history)

    async def create_group(
        self,
        group_id: str,
        environment: str,
        *,
        num_sessions: int,
        choice: TaskChoice,
        ttl_s: float | None = None,
    ) -> GroupOpening:
        """Open sessions at the start of one task, all or none; a retry finds the same ones."""
        request = pb.CreateGroupRequest(
            group_id=group_id,
            environment=environment,
            num_sessions=num_sessions,
            task=CHOICE.to_proto(choice),
            ttl_s=ttl_s,
        )
        answer = await self._call(CREATE_GROUP, request)
        require_count(len(answer.resets), num_sessions, "sessions")
        return GroupOpening(
            session_ids=tuple(answer.session_ids),
            openings=tuple(map(RESET_RESULT.from_proto, answer.resets)),
            ttl_s=answer.ttl_s,
        )

    async def get_session(self, session_id: str) -> SessionState:
        """Return the session's state; NotFound (SESSION_LOST, SESSION_EXPIRED) when it is gone."""
        request = pb.GetSessionRequest(session_id=session_id)
        return SESSION_STATE.from_proto(await self._call(GET_SESSION, request))

    async def close_session(self, session_id: str) -> bool:
        """Forget the session; return whether there was one."""
        request = pb.CloseSessionRequest(session_id=session_id)
        return bool((await self._call(CLOSE_SESSION, request)).closed)

    async def score(self, trajectory: Trajectory, *, split: str) -> tuple[Score, ...]:
        """Recompute a finished trajectory's rewards: one score per turn, with what failed."""
        request = pb.ScoreRequest(split=split, trajectory=TRAJECTORY.to_proto(trajectory))
        answer = await self._call(SCORE, request)
        return tuple(map(TURN_SCORE.from_proto, answer.turns))
