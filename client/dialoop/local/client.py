"""Environments in this process, behind the interface of EnvironmentClient: no server, no network.

environments = LocalEnvironmentClient(arithmetic())
trajectory = await play(task, sessions=environments, policy=policy)

The session engine is that of the environment service, so answers and errors, their classes and
reasons, are the same; what an environment itself raises is the cause of the InternalError.
Sessions never expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from dialoop.chat import ChatHistory
from dialoop.clients.environment import EnvironmentClient, EnvironmentInfo, ResetItem, StepItem
from dialoop.clients.environment_records import info_of
from dialoop.environments import Answered, Environment
from dialoop.environments.environment import Given, Managed
from dialoop.environments.episode import Score
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import SessionEngine
from dialoop.environments.sessions.records import (
    ResetCall,
    SessionLimits,
    StepCall,
    reset_result,
    step_result,
)
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.environments.tasks.source import TaskPage
from dialoop.episode import GroupOpening, ResetResult, Resumed, SessionState, StepResult
from dialoop.errors import ERRORS_BY_STATUS, DialoopError, InternalError
from dialoop.trajectory import Trajectory

T = TypeVar("T")
P = ParamSpec("P")

# The service's time-outs. No other client shares this process, so its capacity is high.
LOCAL_LIMITS = SessionLimits(capacity=1_000_000, max_working=1_000_000)


def _as_served(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a method so that its errors are those of one that was called on a server."""

    @wraps(method)
    async def wrapper(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return await method(*arguments, **options)
        except Exception as error:
            raise _error_of_service(error) from error

    return wrapper


def _error_of_service(error: Exception) -> DialoopError:
    """Return what a client of a service would get: an error of its status's class."""
    if not isinstance(error, DialoopError) or isinstance(error, InternalError):
        return InternalError(
            f"The environment raised {type(error).__name__}: {error}.", remedy="See the cause."
        )
    kind = ERRORS_BY_STATUS[error.status]
    return kind(error.message, reason=error.reason, remedy=error.remedy)


class LocalEnvironmentClient:
    """Plays environments in this process; use one from one event loop.

    An environment acquires what it needs (a connection, a pool) with its first session; leaving
    the client's context releases that. A step that takes longer than
    `limits.step_timeout_s` ends its episode with a failure, as on a service.
    """

    def __init__(self, *environments: Environment, limits: SessionLimits = LOCAL_LIMITS) -> None:
        self._catalogue = Catalogue(environments)
        # A clock that stands still: no session's time to live runs out.
        self._sessions = SessionEngine(self._catalogue, limits, clock=lambda: 0.0)
        self._acquired: dict[str, Managed] = {}
        self._acquiring = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sessions.close_all()
        for environment in self._acquired.values():
            await environment.release()
        self._acquired.clear()

    @_as_served
    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """Return all environments."""
        return tuple(info_of(environment) for environment in self._catalogue)

    @_as_served
    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """Describe an environment; NotFound (ENVIRONMENT_NOT_FOUND) where none has that name."""
        return info_of(self._catalogue.get(environment))

    @_as_served
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
        return self._catalogue.get(environment).tasks.page(
            split,
            page_token=page_token,
            page_size=page_size,
            one_epoch=one_epoch,
            shuffle_seed=shuffle_seed,
        )

    @_as_served
    async def create_session(
        self, session_id: str, environment: str, *, ttl_s: float | None = None
    ) -> float:
        """Open a session under the caller's id; return its time to live in seconds."""
        await self._acquire(self._catalogue.get(environment))
        return self._sessions.create(session_id, environment, ttl_s).ttl_s

    @_as_served
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
        """Start an episode of the session; a retry gets the first result.

        One that is `resumed` goes on from a snapshot; PreconditionFailed (SNAPSHOT_TORN).
        """
        choice = TaskChoice(split=split, task_key=task_key, seed=seed, question=question or Given())
        call = ResetCall(session_id=session_id, episode=episode, choice=choice, resumed=resumed)
        environment = self._sessions.get(session_id).environment
        return reset_result(await self._sessions.reset(call), environment)

    @_as_served
    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: Answered
    ) -> StepResult:
        """Step with the policy's answer; a retry gets the first result."""
        played = await self._sessions.step(
            StepCall(
                session_id=session_id,
                episode=episode,
                step_index=step_index,
                answered=history,
            )
        )
        return step_result(played.outcome, replayed=played.replayed)

    @_as_served
    async def step_and_reset(
        self, item: StepItem, *, next_split: str, next_task_key: str, next_seed: int = 0
    ) -> tuple[StepResult, ResetResult | None]:
        """Step, and where that ends the episode open the next one in the same session."""
        environment = self._sessions.get(item.session_id).environment
        played, opening = await self._sessions.step_and_reset(
            StepCall(
                session_id=item.session_id,
                episode=item.episode,
                step_index=item.step_index,
                answered=item.history,
            ),
            ResetCall(
                session_id=item.session_id,
                episode=item.episode + 1,
                choice=TaskChoice(split=next_split, task_key=next_task_key, seed=next_seed),
            ),
        )
        result = step_result(played.outcome, replayed=played.replayed)
        return result, None if opening is None else reset_result(opening, environment)

    @_as_served
    async def batch_reset(
        self, items: Iterable[ResetItem]
    ) -> tuple[ResetResult | DialoopError, ...]:
        """Reset many sessions; an item that failed is its error, the others are unharmed."""
        return await _each(
            self.reset(
                item.session_id,
                episode=item.episode,
                split=item.split,
                task_key=item.task_key,
                seed=item.seed,
                question=item.question,
                resumed=item.resumed,
            )
            for item in items
        )

    @_as_served
    async def batch_step(self, items: Iterable[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        """Step many sessions; an item that failed is its error, the others are unharmed."""
        return await _each(
            self.step(
                item.session_id,
                episode=item.episode,
                step_index=item.step_index,
                history=item.history,
            )
            for item in items
        )

    @_as_served
    async def step_history(
        self, environment: str, choice: TaskChoice, history: ChatHistory
    ) -> StepResult:
        """Step without a session, from the whole history; a retry runs its tools again."""
        await self._acquire(self._catalogue.get(environment))
        return step_result(await self._sessions.step_history(environment, choice, history))

    @_as_served
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
        await self._acquire(self._catalogue.get(environment))
        members = await self._sessions.create_group(
            group_id, environment, num_sessions, choice, ttl_s
        )
        return GroupOpening(
            session_ids=tuple(session.session_id for session, _ in members),
            openings=tuple(
                reset_result(opening, session.environment) for session, opening in members
            ),
            ttl_s=members[0][0].ttl_s,
        )

    @_as_served
    async def get_session(self, session_id: str) -> SessionState:
        """Return the session's state; NotFound (SESSION_LOST) when it is gone."""
        return self._sessions.state(session_id)

    @_as_served
    async def close_session(self, session_id: str) -> bool:
        """Forget the session; return whether there was one."""
        return self._sessions.close(session_id)

    @_as_served
    async def score(self, trajectory: Trajectory, *, split: str) -> tuple[Score, ...]:
        """Recompute a finished trajectory's rewards: one score per turn, with what failed."""
        environment = self._catalogue.get(trajectory.environment)
        task = environment.tasks.get(split, trajectory.task_key)
        return await environment.score(task, trajectory)

    async def _acquire(self, environment: Environment) -> None:
        async with self._acquiring:
            if isinstance(environment, Managed) and environment.name not in self._acquired:
                await environment.acquire()
                self._acquired[environment.name] = environment


Environments = EnvironmentClient | LocalEnvironmentClient
"""Environments on a server or in this process: both have the same methods."""


async def _each(items: Iterable[Coroutine[Any, Any, T]]) -> tuple[T | DialoopError, ...]:
    async def result_or_error(item: Coroutine[Any, Any, T]) -> T | DialoopError:
        try:
            return await item
        except DialoopError as error:
            return error

    async with asyncio.TaskGroup() as working:
        tasks = [working.create_task(result_or_error(item)) for item in items]
    return tuple(task.result() for task in tasks)
