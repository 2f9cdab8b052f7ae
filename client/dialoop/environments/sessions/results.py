"""The client's view of an environment's opening and outcome, and of a session."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory
from dialoop.environments.episode import Opening
from dialoop.episode import ResetResult, SessionState, StepResult

if TYPE_CHECKING:
    from dialoop.environments.environment import Environment
    from dialoop.environments.episode import Episode, Outcome
    from dialoop.environments.sessions.records import Session


def reset_result(opening: Opening, environment: Environment) -> ResetResult:
    """Return the answer to a reset."""
    return ResetResult(
        history=_messages(opening.episode),
        info=dict(opening.info),
        environment_version=environment.version,
        text=opening.text,
        tokens=opening.tokens,
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
    )


def session_state(session: Session, *, expires_in_s: float) -> SessionState:
    """Return the session's state."""
    state = SessionState(
        session_id=session.session_id,
        environment=session.environment.name,
        episode=session.episode_number,
        next_step_index=0,
        done=False,
        history=ChatHistory(),
        expires_in_s=expires_in_s,
    )
    if session.current is None:
        return state
    episode = session.current.episode
    prompt = Opening(episode=episode)
    return replace(
        state,
        next_step_index=episode.step_index,
        done=episode.done,
        history=_messages(episode),
        text=prompt.text,
        tokens=prompt.tokens,
    )


def _messages(episode: Episode) -> ChatHistory:
    """Return the messages so far in history mode; elsewhere the prompt is text or tokens."""
    return ChatHistory(prompt=episode.history) if episode.view is None else ChatHistory()
