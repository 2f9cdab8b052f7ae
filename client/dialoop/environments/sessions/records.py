"""What a session remembers and tells, and which call may come next: order, retries and errors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from dialoop.chat import ChatHistory, History
from dialoop.environments import refusals
from dialoop.environments.environment import Environment
from dialoop.environments.episode import Episode, Opening, Outcome
from dialoop.environments.modes import Answered
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.episode import ResetResult, Resumed, SessionState, StepResult
from dialoop.errors import DialoopError
from dialoop.reasons import Reason

Prompt: TypeAlias = Any
"""A History, a str, or token ids as a tuple; two that meet are of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of the engine: SessionLimits(ttl_s=900, capacity=4096, step_timeout_s=120, ...)."""

    ttl_s: float = 900.0
    max_ttl_s: float = 86_400.0
    capacity: int = 4096
    step_timeout_s: float = 120.0
    # How long a step runs on after all its callers disconnected; then it is cancelled.
    abandon_s: float = 10.0
    max_working: int = 1024
    max_snapshot_bytes: int = 4 * 1024 * 1024
    reap_interval_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetCall:
    """The arguments of a reset; the same call twice is a retry, with a snapshot or without."""

    session_id: str
    episode: int
    choice: TaskChoice
    resumed: Resumed | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """The arguments of a step."""

    session_id: str
    episode: int
    step_index: int
    answered: Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredStep:
    """A step's outcome, and whether an earlier identical request produced it."""

    call: StepCall
    record: EpisodeRecord
    outcome: Outcome
    replayed: bool

    @property
    def added(self) -> Prompt | None:
        """Return what follows the step's full in the next prompt; None if the past was changed."""
        before = prompt_of_episode(self.record.episode_before(self.call.step_index))
        full = full_of(before, self.call.answered)
        return added_to(full, prompt_of_episode(self.outcome.episode))


@dataclass(slots=True)
class StoredStep:
    """The first request of a step index: what the policy sent, and its outcome or its work.

    The work returns a bad request's error instead of raising it, since no caller may be left.
    `num_waiting` counts the callers that wait for its outcome. `cut_reason` says why the work was
    cancelled: STEP_TIMEOUT or STEP_CANCELLED.
    """

    content: Any
    outcome: Outcome | None = None
    work: asyncio.Task[Outcome | DialoopError] | None = None
    num_waiting: int = 0
    cut_reason: Reason | None = None
    has_timer: bool = False

    @property
    def is_running(self) -> bool:
        """Return whether its work is under way."""
        return self.work is not None and not self.work.done()

    def limit(self, timeout_s: float) -> None:
        """Cancel the work after `timeout_s` seconds; later calls change nothing."""
        if not self.has_timer and self.work is not None:
            self.has_timer = True
            timer = asyncio.get_running_loop().call_later(timeout_s, self._cut, Reason.STEP_TIMEOUT)
            self.work.add_done_callback(lambda _: timer.cancel())

    def abandon(self) -> None:
        """Cancel the work, and the tool that it runs, if no caller waits for it."""
        if not self.num_waiting:
            self._cut(Reason.STEP_CANCELLED)

    def _cut(self, reason: Reason) -> None:
        if self.work is not None and not (self.work.done() or self.cut_reason):
            self.cut_reason = reason
            self.work.cancel()


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One episode of a session. Only SessionEngine changes it."""

    reset_call: ResetCall
    opening: Opening
    episode: Episode
    steps: dict[int, StoredStep] = field(default_factory=dict)
    # Whether the engine has closed it at the environment.
    is_closed: bool = False

    @property
    def number(self) -> int:
        """Return the episode's number in its session, from 1."""
        return self.reset_call.episode

    @property
    def num_steps(self) -> int:
        """Return how many steps were taken, here or before the snapshot that it began with."""
        return self.opening.episode.step_index + len(self.steps)

    @property
    def running(self) -> StoredStep | None:
        """Return the step under way, which is the last one, or None."""
        last = self.steps.get(self.num_steps - 1)
        return last if last is not None and last.is_running else None

    def episode_before(self, step_index: int) -> Episode:
        """Return the episode as it was before a step that is stored, or that comes next."""
        stored = self.steps.get(step_index - 1)
        if stored is None:
            return self.opening.episode
        assert stored.outcome is not None  # a step that was refused is not stored
        return stored.outcome.episode

    def stored_for(self, call: StepCall) -> StoredStep | None:
        """Return the stored step that the same call began, or None."""
        stored = self.steps.get(call.step_index)
        is_same = stored is not None and self.content_of(call) == stored.content
        return stored if is_same else None

    def content_of(self, call: StepCall) -> Any:
        """Return what the policy sent in a step that is stored, or that comes next."""
        return content_of(prompt_of_episode(self.episode_before(call.step_index)), call.answered)


@dataclass(slots=True, kw_only=True)
class Session:
    """A client's episodes in one environment. Only SessionEngine changes it.

    It keeps the episode before the current one, so that a retried step_and_reset gets its answer.
    """

    session_id: str
    environment: Environment
    ttl_s: float
    expires_at: float
    current: EpisodeRecord | None = None
    previous: EpisodeRecord | None = None
    # The reset under way of an environment that opens slowly, and its work.
    slow_reset: tuple[ResetCall, asyncio.Task[Opening | DialoopError]] | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a step or a slow reset is under way."""
        if self.slow_reset is not None:
            return True
        return self.current is not None and self.current.running is not None

    @property
    def episode_number(self) -> int:
        """Return the number of the current episode; 0 before the first reset."""
        return self.current.number if self.current else 0

    def opening_for(self, call: ResetCall) -> Opening | None:
        """Return the opening that the same reset returned before; STEP_CONFLICT for another one."""
        record = self._record_of(call.episode)
        if record is None:
            return None
        if record.reset_call != call:
            raise refusals.step_conflict(f"Episode {call.episode}")
        return record.opening

    def require_next_episode(self, episode: int) -> None:
        """Raise unless a reset may open this episode now."""
        following = self.episode_number + 1
        if episode < 1:
            raise refusals.bad_value("episode", "Episodes start at 1.")
        if episode < following:
            raise refusals.step_conflict(f"Episode {episode}")
        if episode > following:
            raise refusals.step_gap(f"Episode {episode}", following)
        if self.is_busy:
            raise refusals.session_busy(self.session_id)

    def record_for(self, call: StepCall) -> EpisodeRecord:
        """Return the episode of a step; raise unless the step may be taken or replayed."""
        if call.step_index < 0 or call.episode < 1:
            raise refusals.bad_value("episode or step_index", "They start at 1 and at 0.")
        record = self._record_of(call.episode)
        if record is None and call.episode <= self.episode_number:
            raise refusals.episode_done(call.episode)
        if record is None:
            raise refusals.step_gap(f"Episode {call.episode}", self.episode_number + 1)
        stored = record.steps.get(call.step_index)
        if stored is not None and record.stored_for(call) is not None:
            return record
        if record.running is not None:
            raise refusals.session_busy(self.session_id)
        if stored is not None:
            raise refusals.step_conflict(f"Step {call.step_index}")
        if record.episode.done or record is not self.current:
            raise refusals.episode_done(call.episode)
        if call.step_index != record.num_steps:
            raise refusals.step_gap(f"Step {call.step_index}", record.num_steps)
        return record

    def state(self, *, expires_in_s: float) -> SessionState:
        """Return what a client is told of the session."""
        state = SessionState(
            session_id=self.session_id,
            environment=self.environment.name,
            episode=self.episode_number,
            next_step_index=0,
            done=False,
            history=ChatHistory(),
            expires_in_s=expires_in_s,
        )
        if self.current is None:
            return state
        episode = self.current.episode
        prompt = Opening(episode=episode)
        return replace(
            state,
            next_step_index=episode.step_index,
            done=episode.done,
            history=_messages(episode),
            text=prompt.text,
            tokens=prompt.tokens,
        )

    def _record_of(self, episode: int) -> EpisodeRecord | None:
        for record in (self.current, self.previous):
            if record is not None and record.reset_call.episode == episode:
                return record
        return None


def reset_result(opening: Opening, environment: Environment) -> ResetResult:
    """Return the answer to a reset."""
    return ResetResult(
        history=_messages(opening.episode),
        info=dict(opening.info),
        environment_version=environment.version,
        text=opening.text,
        tokens=opening.tokens,
        tools=environment.traits.prompt_tools,
    )


def step_result(outcome: Outcome, *, replayed: bool = False) -> StepResult:
    """Return the answer to a step; `replayed` if an earlier identical request ran it."""
    episode = outcome.episode
    return StepResult(
        history=_messages(episode),
        rewards=outcome.rewards,
        terminated=episode.terminated,
        truncated=episode.truncated,
        done_reason=episode.done_reason,
        failures=outcome.failures,
        num_tool_calls=outcome.num_tool_calls,
        replayed=replayed,
        info=dict(outcome.info),
        text=outcome.text,
        tokens=outcome.tokens,
        snapshot=outcome.snapshot,
    )


def prompt_of_episode(episode: Episode) -> Prompt:
    """Return what the policy sees next, in the environment's mode."""
    return episode.history if episode.view is None else episode.view.prompt.prompt


def full_of(prompt: Prompt, answered: Answered) -> Prompt:
    """Return the step's full: what the policy sent as such, or the prompt and its response."""
    if answered.full is not None:
        return answered.full
    before: Prompt = prompt if answered.prompt is None else answered.prompt
    response: Prompt = answered.response
    if response is None:
        return before
    return before.extend(response) if isinstance(before, History) else before + response


def content_of(prompt: Prompt, answered: Answered) -> Any:
    """Return what tells a step from another one: the response, however it was sent.

    What does not continue the prompt, or contradicts itself, is returned as it is.
    """
    sent: Prompt | None = answered.response
    if answered.full is not None:
        sent = _following(prompt, answered.full)
    fits = answered.prompt in (None, prompt) and answered.response in (None, sent)
    return answered if sent is None or not fits else sent


def added_to(full: Prompt, after: Prompt) -> Prompt | None:
    """Return what follows a step's full in the next prompt; None where the past was changed."""
    return _following(full, after)


def _following(start: Prompt, whole: Prompt) -> Prompt | None:
    """Return what follows `start` in `whole`; None where that begins otherwise."""
    return whole[len(start) :] if whole[: len(start)] == start else None


def _messages(episode: Episode) -> ChatHistory:
    """Return the messages so far in history mode; elsewhere the prompt is text or tokens."""
    return ChatHistory(prompt=episode.history) if episode.view is None else ChatHistory()
