"""Environments in this process, behind the interface of EnvironmentClient: no server, no network.

environments = LocalEnvironmentClient(arithmetic())
trajectory = await play(task, sessions=environments, policy=policy)

Answers and errors, their classes and reasons, are those of the environment service; what an
environment itself raises is the cause of the InternalError. Sessions never expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dialoop.chat import ChatHistory
from dialoop.clients.environment import (
    EnvironmentClient,
    EnvironmentInfo,
    GroupOpening,
    SessionState,
    SplitInfo,
)
from dialoop.environments import refusals
from dialoop.environments.environment import Given, Managed, Stateless
from dialoop.environments.episode import Opening as EnvironmentOpening
from dialoop.environments.spec import spec_of
from dialoop.environments.tasks.choosing import TaskChoice, chosen_task, prompt_of, require_choice
from dialoop.episode import Opening, Outcome
from dialoop.errors import ERRORS_BY_STATUS, DialoopError, InternalError
from dialoop.local.episodes import LocalSession, StepCall, public_opening, public_outcome
from dialoop.local.runs import LocalRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from dialoop.clients.environment import ResetItem, StepItem
    from dialoop.environments import Answered, Environment
    from dialoop.environments.episode import Score
    from dialoop.environments.tasks.source import TaskPage
    from dialoop.trajectory import Trajectory

T = TypeVar("T")
P = ParamSpec("P")

_TTL_S = 900.0
_MAX_TTL_S = 86_400.0
_MAX_ID = 200


def _as_served(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """The method with the errors of one that was called on a server."""

    @wraps(method)
    async def called(*arguments: P.args, **given: P.kwargs) -> T:
        try:
            return await method(*arguments, **given)
        except Exception as error:
            raise _served(error) from error

    return called


def _served(error: Exception) -> DialoopError:
    """What a client of a service would get: the class of its status, never one of our own."""
    if not isinstance(error, DialoopError) or isinstance(error, InternalError):
        return InternalError(
            f"The environment raised {type(error).__name__}: {error}.", remedy="See the cause."
        )
    kind = ERRORS_BY_STATUS[error.status]
    return kind(error.message, reason=error.reason, remedy=error.remedy)


class LocalEnvironmentClient(LocalRuns):
    """Plays environments in this process; use one from one event loop.

    What an environment has to take before it can play (a connection, a pool) it takes with its
    first session; leaving the client as a context gives that back.
    """

    def __init__(self, *environments: Environment) -> None:
        self._environments = {environment.name: environment for environment in environments}
        self._sessions: dict[str, LocalSession] = {}
        self._acquired: dict[str, Managed] = {}
        self._acquiring = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session_id in tuple(self._sessions):
            await self.close_session(session_id)
        for environment in self._acquired.values():
            await environment.release()
        self._acquired.clear()

    @_as_served
    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """All environments there are."""
        return tuple(_info(environment) for environment in self._environments.values())

    @_as_served
    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """One environment; NotFound (ENVIRONMENT_NOT_FOUND) when there is none of that name."""
        return _info(self._environment(environment))

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
        """One page of tasks; pages run on through epochs unless `one_epoch`."""
        return self._environment(environment).tasks.page(
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
        """Open a session under the caller's id; its time to live in seconds."""
        if not 0 < len(session_id) <= _MAX_ID:
            raise refusals.bad_value("session_id", f"Choose 1 to {_MAX_ID} characters.")
        if ttl_s is not None and not 0 < ttl_s <= _MAX_TTL_S:
            raise refusals.bad_value("ttl_s", f"Give seconds above 0, up to {_MAX_TTL_S:g}.")
        found = self._environment(environment)
        await self._acquire(found)
        made = LocalSession(session_id, found, ttl_s=_TTL_S if ttl_s is None else ttl_s)
        known = self._sessions.setdefault(session_id, made)
        if known.environment is not found:
            raise refusals.session_conflict(session_id, known.environment.name)
        return known.ttl_s

    @_as_served
    async def reset(
        self,
        session_id: str,
        *,
        episode: int,
        split: str = "",
        task_key: str = "",
        seed: int = 0,
        given: Given | None = None,
    ) -> Opening:
        """Start an episode of the session; a retry gets the first opening."""
        session = self._session(session_id)
        choice = TaskChoice(split=split, task_key=task_key, seed=seed, given=given or Given())
        opening = await session.reset(episode, choice)
        await session.let_go(but_the_running=True)
        return public_opening(opening, session.environment)

    @_as_served
    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: Answered
    ) -> Outcome:
        """Take the policy's answer; a retry gets the first answer."""
        call = StepCall(episode=episode, step_index=step_index, answered=history)
        return await self._session(session_id).step(call)

    @_as_served
    async def step_and_reset(
        self, item: StepItem, *, next_split: str, next_task_key: str, next_seed: int = 0
    ) -> tuple[Outcome, Opening | None]:
        """Step, and where that ends the episode open the next one in the same session."""
        following = TaskChoice(split=next_split, task_key=next_task_key, seed=next_seed)
        # Before the step is taken, so that an unknown task costs none.
        require_choice(self._session(item.session_id).environment, following)
        outcome = await self._step(item)
        if not outcome.done:
            return outcome, None
        opening = await self.reset(
            item.session_id,
            episode=item.episode + 1,
            split=next_split,
            task_key=next_task_key,
            seed=next_seed,
        )
        return outcome, opening

    @_as_served
    async def batch_reset(self, items: Iterable[ResetItem]) -> tuple[Opening | DialoopError, ...]:
        """Reset many sessions; an item that failed is its error, the others are unharmed."""
        return await _each(self._reset(item) for item in items)

    @_as_served
    async def batch_step(self, items: Iterable[StepItem]) -> tuple[Outcome | DialoopError, ...]:
        """Step many sessions; an item that failed is its error, the others are unharmed."""
        return await _each(self._step(item) for item in items)

    @_as_served
    async def step_history(
        self, environment: str, choice: TaskChoice, history: ChatHistory
    ) -> Outcome:
        """A step without a session, from the whole history; a retry runs its tools again."""
        served = self._environment(environment)
        prompt = prompt_of(history)
        if not isinstance(served, Stateless):
            raise refusals.needs_session(environment)
        task, seed = chosen_task(served, choice)
        episode = served.resume(task, seed, prompt)
        return public_outcome(await served.step(episode, history))

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
        """Open sessions at the start of one task; a retry finds the same ones."""
        if not group_id or num_sessions < 1:
            raise refusals.bad_value("group_id or num_sessions", "Give a name, and at least 1.")
        ids = tuple(f"{group_id}.{number}" for number in range(num_sessions))
        opened: list[EnvironmentOpening] = []
        for session_id in ids:
            await self.create_session(session_id, environment, ttl_s=ttl_s)
            session = self._session(session_id)
            first = opened[0].episode if opened else None
            chosen = None if first is None else (first.task, first.seed)
            opened.append(await session.reset(1, choice, chosen))
        served = self._session(ids[0])
        openings = tuple(public_opening(opening, served.environment) for opening in opened)
        return GroupOpening(session_ids=ids, openings=openings, ttl_s=served.ttl_s)

    @_as_served
    async def get_session(self, session_id: str) -> SessionState:
        """Where the session stands; NotFound (SESSION_LOST) when it is gone."""
        session = self._session(session_id)
        state = SessionState(
            session_id=session_id,
            environment=session.environment.name,
            episode=session.episode_number,
            next_step_index=0,
            done=False,
            history=ChatHistory(),
            expires_in_s=session.ttl_s,
        )
        if session.current is None:
            return state
        now = session.current.episode
        shown = public_opening(EnvironmentOpening(episode=now), session.environment)
        return replace(
            state,
            next_step_index=now.step_index,
            done=now.done,
            history=shown.history,
            text=shown.text,
            tokens=shown.tokens,
        )

    @_as_served
    async def close_session(self, session_id: str) -> bool:
        """Forget the session; whether there was one."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        await session.close()
        return True

    @_as_served
    async def score(self, trajectory: Trajectory, *, split: str) -> tuple[Score, ...]:
        """Recompute a finished trajectory's rewards: one score per turn, with what failed."""
        environment = self._environment(trajectory.environment)
        task = environment.tasks.get(split, trajectory.task_key)
        return await environment.score(task, trajectory)

    async def _acquire(self, environment: Environment) -> None:
        async with self._acquiring:
            if isinstance(environment, Managed) and environment.name not in self._acquired:
                await environment.acquire()
                self._acquired[environment.name] = environment

    async def _reset(self, item: ResetItem) -> Opening:
        return await self.reset(
            item.session_id,
            episode=item.episode,
            split=item.split,
            task_key=item.task_key,
            seed=item.seed,
            given=item.given,
        )

    async def _step(self, item: StepItem) -> Outcome:
        return await self.step(
            item.session_id,
            episode=item.episode,
            step_index=item.step_index,
            history=item.history,
        )

    def _environment(self, name: str) -> Environment:
        if name not in self._environments:
            raise refusals.unknown_environment(name, self._environments)
        return self._environments[name]

    def _session(self, session_id: str) -> LocalSession:
        if session_id not in self._sessions:
            raise refusals.session_lost(session_id)
        return self._sessions[session_id]


Environments = EnvironmentClient | LocalEnvironmentClient
"""Environments on a server or in this process: both have the same methods."""


async def _each(items: Iterable[Coroutine[Any, Any, T]]) -> tuple[T | DialoopError, ...]:
    async def one(item: Coroutine[Any, Any, T]) -> T | DialoopError:
        try:
            return await item
        except DialoopError as error:
            return error

    async with asyncio.TaskGroup() as working:
        tasks = [working.create_task(one(item)) for item in items]
    return tuple(task.result() for task in tasks)


def _info(environment: Environment) -> EnvironmentInfo:
    tasks, traits = environment.tasks, environment.traits
    return EnvironmentInfo(
        name=environment.name,
        version=environment.version,
        description=environment.description,
        splits=tuple(SplitInfo(name=s, num_tasks=tasks.num_tasks(s)) for s in tasks.splits),
        max_turns=traits.max_turns,
        stop=traits.stop,
        tools=traits.tools,
        reward_names=traits.reward_names,
        spec=spec_of(environment),
    )
