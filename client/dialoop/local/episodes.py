"""Sessions of environments in this process: episodes in order, and each step taken once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory, History
from dialoop.environments import refusals
from dialoop.environments.environment import Managed, OpensSlowly
from dialoop.environments.episode import Outcome as EnvironmentOutcome
from dialoop.environments.failures import failure_of
from dialoop.environments.tasks.choosing import TaskChoice, chosen_task, settled
from dialoop.episode import Opening, Outcome
from dialoop.errors import DialoopError, NotFound
from dialoop.trajectory import Owner

if TYPE_CHECKING:
    from dialoop.environments import Answered, Environment, Episode, TaskData
    from dialoop.environments import Opening as EnvironmentOpening

    Work = asyncio.Task[EnvironmentOutcome | DialoopError]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """A step as it was asked; the same call twice is a retry."""

    episode: int
    step_index: int
    answered: Answered


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One episode: what it was asked for, where it stands, and the work of each step."""

    number: int
    asked: TaskChoice
    opening: EnvironmentOpening
    episode: Episode
    steps: dict[int, tuple[Answered, Work]] = field(default_factory=dict)
    # Whether the environment was told that it takes no more steps.
    is_closed: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return any(not work.done() for _, work in self.steps.values())


class LocalSession:
    """One place in one environment; remembers the running episode and the one before."""

    def __init__(self, session_id: str, environment: Environment, *, ttl_s: float) -> None:
        self.session_id = session_id
        self.environment = environment
        self.ttl_s = ttl_s
        self.current: EpisodeRecord | None = None
        self._previous: EpisodeRecord | None = None
        self._resetting = asyncio.Lock()

    @property
    def episode_number(self) -> int:
        """The running episode; 0 before the first reset."""
        return self.current.number if self.current else 0

    async def reset(
        self, episode: int, choice: TaskChoice, chosen: tuple[TaskData, int] | None = None
    ) -> EnvironmentOpening:
        """Start an episode, of the task in `chosen` if that is known; a retry finds it opened."""
        async with self._resetting:
            asked = settled(self.environment, choice)
            record = self._record_of(episode)
            if record is not None:
                if record.asked != asked:
                    raise refusals.step_conflict(f"Episode {episode}")
                return record.opening
            self._require_next(episode)
            task, seed = chosen or chosen_task(self.environment, asked)
            if isinstance(self.environment, OpensSlowly):
                opening = await self.environment.open(task, seed)
            else:
                opening = self.environment.reset(task, seed)
            return self._begun(episode, asked, opening)

    def _begun(
        self, episode: int, asked: TaskChoice, opening: EnvironmentOpening
    ) -> EnvironmentOpening:
        self._previous = self.current
        self.current = EpisodeRecord(
            number=episode, asked=asked, opening=opening, episode=opening.episode
        )
        return opening

    async def step(self, call: StepCall) -> Outcome:
        """Take the policy's answer; a retry gets the first outcome and runs no tool twice."""
        record = self._record_for(call)
        replayed = call.step_index in record.steps
        if not replayed:
            work = asyncio.create_task(self._work(record, call))
            record.steps[call.step_index] = (call.answered, work)
        _, work = record.steps[call.step_index]
        try:
            outcome = await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():  # the session was closed, which is not a cancellation of ours
                raise NotFound(
                    f"Session '{self.session_id[:80]}' was closed.", reason="SESSION_LOST"
                ) from None
            raise
        if isinstance(outcome, DialoopError):
            raise outcome
        return replace(public_outcome(outcome), replayed=replayed)

    async def close(self) -> None:
        """Cancel the step under way, and let the episode go."""
        works = [work for _, work in self.current.steps.values()] if self.current else []
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)
        await self.let_go()

    async def let_go(self, *, but_the_running: bool = False) -> None:
        """Tell the environment, once, of each episode that takes no more steps."""
        records = (self._previous,) if but_the_running else (self._previous, self.current)
        for record in records:
            if record is not None and not record.is_closed:
                record.is_closed = True
                if isinstance(self.environment, Managed):
                    await self.environment.close(record.episode)

    async def _work(
        self, record: EpisodeRecord, call: StepCall
    ) -> EnvironmentOutcome | DialoopError:
        """The work of one step; a bad request leaves everything as it was."""
        try:
            outcome = await self.environment.step(record.episode, call.answered)
        except DialoopError as error:
            del record.steps[call.step_index]
            return error
        except Exception as error:
            what = f"Environment {self.environment.name}"
            failure = failure_of(error, owner=Owner.ENVIRONMENT, reason="STEP_FAILED", what=what)
            outcome = _unanswered(record.episode, call.answered).fail(failure)
        record.episode = outcome.episode
        if outcome.episode.done:
            await self.let_go()
        return outcome

    def _record_of(self, episode: int) -> EpisodeRecord | None:
        records = (self.current, self._previous)
        return next((r for r in records if r is not None and r.number == episode), None)

    def _require_next(self, episode: int) -> None:
        following = self.episode_number + 1
        if episode < 1:
            raise refusals.bad_value("episode", "Episodes start at 1.")
        if episode < following:
            raise refusals.step_conflict(f"Episode {episode}")
        if episode > following:
            raise refusals.step_gap(f"Episode {episode}", following)
        if self.current is not None and self.current.is_busy:
            raise refusals.session_busy(self.session_id)

    def _record_for(self, call: StepCall) -> EpisodeRecord:
        """The episode a step belongs to, once it is known that it may be taken or replayed."""
        if call.step_index < 0 or call.episode < 1:
            raise refusals.bad_value("episode or step_index", "They start at 1 and at 0.")
        record = self._record_of(call.episode)
        if record is None and call.episode <= self.episode_number:
            raise refusals.episode_done(call.episode)
        if record is None:
            raise refusals.step_gap(f"Episode {call.episode}", self.episode_number + 1)
        stored = record.steps.get(call.step_index)
        if stored is not None and stored[0] == call.answered:
            return record
        if record.is_busy:
            raise refusals.session_busy(self.session_id)
        if stored is not None:
            raise refusals.step_conflict(f"Step {call.step_index}")
        if record.episode.done or record is not self.current:
            raise refusals.episode_done(call.episode)
        if call.step_index != len(record.steps):
            raise refusals.step_gap(f"Step {call.step_index}", len(record.steps))
        return record


def public_opening(opening: EnvironmentOpening, environment: Environment) -> Opening:
    """What a client sees of an environment's opening."""
    return Opening(
        history=_shown(opening),
        info=dict(opening.info),
        environment_version=environment.version,
        text=opening.text,
        tokens=opening.tokens,
    )


def _shown(made: EnvironmentOpening | EnvironmentOutcome) -> ChatHistory:
    """Messages in history mode only: elsewhere the prompt is text or tokens."""
    return made.history if made.episode.view is None else ChatHistory()


def public_outcome(outcome: EnvironmentOutcome) -> Outcome:
    """What a client sees of an environment's outcome."""
    episode = outcome.episode
    return Outcome(
        history=_shown(outcome),
        rewards=outcome.rewards,
        terminated=episode.terminated,
        truncated=episode.truncated,
        done_reason=episode.done_reason,
        failures=outcome.failures,
        num_tool_calls=outcome.num_tool_calls,
        info=dict(outcome.info),
        text=outcome.text,
        tokens=outcome.tokens,
    )


def _unanswered(episode: Episode, answered: Answered) -> EnvironmentOutcome:
    """The outcome of a step in which the environment added nothing."""
    if not isinstance(answered, ChatHistory):
        stood = replace(episode, step_index=episode.step_index + 1)
        return EnvironmentOutcome(episode=stood, response=History())
    response = answered.response or History()
    full = answered.full or episode.history.extend(response)
    after = replace(episode, history=full, step_index=episode.step_index + 1)
    return EnvironmentOutcome(episode=after, response=response)
