"""Agents: programs that call an OpenAI-compatible model, played into training data.

    async def run(task: AgentTask, connection: AgentConnection) -> float:
        client = openai.AsyncOpenAI(base_url=connection.base_url, api_key=connection.api_key)
        ...                                            # any number of calls, tools, sub-agents
        return 1.0 if solved else 0.0

    trajectory = await play_agent(task, agent=run, host=AgentHost(recordings=recordings))

The agent does not know that it is recorded. An error becomes a failure with its owner on the
trajectory; it never becomes reward 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.chat import History
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.extras import more_names, offered_paths
from dialoop.failures import error_of, failure_of
from dialoop.import_paths import load_attribute, make_from_options
from dialoop.reasons import Reason
from dialoop.trajectory import Failure, Owner, Reward, SamplingParams, Task, Trajectory
from dialoop.user_functions import TimeIsUp, call, name_of

if TYPE_CHECKING:
    from dialoop.environments.episode import Score
    from dialoop.episode import ResetResult, Sessions

_CLOSE_S = 2.0
_MAX_CAUSES = 16
_CONTEXT_FULL = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnection:
    """What the agent's OpenAI client connects with; any `model` name means the policy.

    api_key: opens this agent's recording, and nothing else.
    """

    base_url: str
    api_key: str = "none"
    model: str = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """A task for an agent, and the first messages of its environment, if it has any."""

    task: Task
    prompt: History = field(default_factory=History)

    @property
    def key(self) -> str:
        """Return the task's name within its environment and split."""
        return self.task.key


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """An agent's report of its run; `failures` are its tools' or others', with their owners."""

    rewards: tuple[Reward, ...] = ()
    failures: tuple[Failure, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


AgentAnswer = AgentOutcome | float | None
Agent = Callable[[AgentTask, AgentConnection], AgentAnswer | Awaitable[AgentAnswer]]
"""An agent returns its reward, a whole outcome, or None where its environment rewards it.

It may be async. A sync agent runs in a thread of its own, which goes on after the time limit,
because Python cannot end it.
"""


class Recordings(Protocol):
    """Where calls are recorded: a RecordingClient."""

    async def create(
        self,
        recording_id: str,
        *,
        group_id: str = "",
        task: Task | None = None,
        sampling: SamplingParams | None = None,
        time_to_live_s: float = 0.0,
    ) -> AgentConnection:
        """Begin a recording; return what the agent connects with."""

    async def close(
        self,
        recording_id: str,
        *,
        rewards: Iterable[Reward] = (),
        failures: Iterable[Failure] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Trajectory:
        """End the recording and return its trajectory."""


class Scores(Protocol):
    """Who rewards trajectories: an EnvironmentClient, with its environment's reward functions."""

    async def score(self, trajectory: Trajectory, *, split: str) -> tuple[Score, ...]:
        """Return one score for each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """Where agents run.

    sessions: where the task is opened, if the agent wants its messages. scores: what gives the
    rewards that the agent does not.
    """

    recordings: Recordings
    sessions: Sessions | None = None
    scores: Scores | None = None
    time_limit_s: float = 600.0


async def play_agent(
    task: Task,
    *,
    agent: Agent,
    host: AgentHost,
    group_id: str = "",
    sampling: SamplingParams | None = None,
) -> Trajectory:
    """Run the agent once under a recording and return the trajectory, whatever happens.

    Only cancellation escapes. `sampling` applies to calls that do not set it themselves.
    """
    recording_id = uuid.uuid4().hex
    sampling = sampling or task.sampling
    failed_trajectory = partial(Trajectory.of_failures, task, group_id=group_id, sampling=sampling)
    try:
        connection = await call(
            host.recordings.create,
            recording_id,
            group_id=group_id,
            task=task,
            sampling=sampling,
            time_to_live_s=2 * host.time_limit_s,
        )
    except Exception as error:
        return failed_trajectory(error_of(error, Owner.INFERENCE))
    try:
        outcome = await _run_agent(task, agent, host, connection)
    except BaseException:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await call(host.recordings.close, recording_id)
        raise
    try:
        trajectory: Trajectory = await call(
            host.recordings.close,
            recording_id,
            rewards=outcome.rewards,
            failures=outcome.failures,
            labels=outcome.labels,
        )
    except Exception as error:
        if isinstance(error, DialoopError) and error.reason == Reason.RECORDING_EMPTY:
            never_asked = error_of(error, Owner.AGENT)
            return failed_trajectory(*(outcome.failures or (never_asked,)))
        return failed_trajectory(*outcome.failures, error_of(error, Owner.INFERENCE))
    return await _add_scores(trajectory, task, host, outcome)


def load_agent(use: str, options: Mapping[str, Any] | None = None) -> Agent:
    """Load the function `module:function`, or an agent of extras by its name.

    Raise InvalidConfig for others.

    options: of the agent's environment, from which a built-in one is made.
    """
    agent: Agent
    makers = offered_paths("agents")
    if use in makers:
        maker = load_attribute(makers[use], what="agent", reason=Reason.AGENT_NOT_FOUND)
        agent = make_from_options(maker, dict(options or {}), use)
        return agent
    agent = load_attribute(
        use,
        what="agent",
        reason=Reason.AGENT_NOT_FOUND,
        built_in=makers,
        more_names=more_names("agents"),
    )
    try:
        inspect.signature(agent).bind("task", "connection")
    except (TypeError, ValueError):
        raise InvalidConfig(
            f"The agent '{use}' is not a function of a task and a connection.",
            reason=Reason.NOT_AN_AGENT,
            remedy="Write `def run(task, connection)`; it may be async.",
        ) from None
    return agent


async def _run_agent(
    task: Task, agent: Agent, host: AgentHost, connection: AgentConnection
) -> AgentOutcome:
    """Run the agent and return its outcome, or the failure that it ended with."""
    try:
        agent_task = AgentTask(task=task, prompt=await _first_messages(task, host))
    except Exception as error:
        return AgentOutcome(failures=(error_of(error, Owner.ENVIRONMENT),))
    try:
        answer = await call(agent, agent_task, connection, timeout_s=host.time_limit_s)
    except Exception as error:
        if isinstance(error, TimeIsUp):
            text = f"The agent took longer than {host.time_limit_s:g} s."
            return AgentOutcome(
                failures=(Failure(owner=Owner.AGENT, reason=Reason.AGENT_TIMED_OUT, message=text),)
            )
        if _is_context_full(error):  # the recording marks the episode as cut off; nothing failed
            return AgentOutcome()
        what = f"The agent {name_of(agent)}"
        failure = failure_of(error, owner=Owner.AGENT, reason=Reason.AGENT_FAILED, what=what)
        return AgentOutcome(failures=(failure,))
    if answer is None or isinstance(answer, AgentOutcome):
        return answer or AgentOutcome()
    try:
        return AgentOutcome(rewards=(Reward(name="agent", value=float(answer)),))
    except (TypeError, ValueError):
        text = (
            f"The agent {name_of(agent)} returned a {type(answer).__name__}. Return its reward, an "
            "AgentOutcome or None."
        )
        failure = Failure(owner=Owner.AGENT, reason=Reason.AGENT_FAILED, message=text)
        return AgentOutcome(failures=(failure,))


async def _first_messages(task: Task, host: AgentHost) -> History:
    """Return the messages that the environment opens the task with."""
    if host.sessions is None:
        return History()
    session_id = uuid.uuid4().hex
    await call(host.sessions.create_session, session_id, task.environment)
    try:
        reset: ResetResult = await call(
            host.sessions.reset,
            session_id,
            episode=1,
            split=task.split,
            task_key=task.key,
            seed=task.seed,
        )
        return reset.history.require_prompt()
    finally:
        with contextlib.suppress(Exception):
            await call(host.sessions.close_session, session_id)


async def _add_scores(
    trajectory: Trajectory, task: Task, host: AgentHost, outcome: AgentOutcome
) -> Trajectory:
    """Return the trajectory with its environment's rewards, unless the agent gave some."""
    if host.scores is None or outcome.rewards or trajectory.failures:
        return trajectory
    try:
        scores = await call(host.scores.score, trajectory, split=task.split)
    except Exception as error:
        return replace(trajectory, failures=(error_of(error, Owner.REWARD),))
    turns = tuple(
        replace(turn, rewards=turn.rewards + score.rewards)
        for turn, score in zip(trajectory.turns, scores, strict=True)
    )
    failures = tuple(failure for score in scores for failure in score.failures)
    return replace(trajectory, turns=turns, failures=failures)


def _is_context_full(error: BaseException) -> bool:
    """Return whether the model's context was full, however the agent's library wraps that."""
    current: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if current is None:
            return False
        if getattr(current, "code", None) == _CONTEXT_FULL:
            return True
        current = current.__cause__ or current.__context__
    return False
