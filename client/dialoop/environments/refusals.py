"""The errors of sessions, each with what to do about it; the same on a server and without one."""

from __future__ import annotations

from collections.abc import Iterable

from dialoop.errors import (
    AlreadyExists,
    Busy,
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unsupported,
)
from dialoop.reasons import Reason


def session_lost(session_id: str) -> NotFound:
    """Nobody here knows the session."""
    return NotFound(
        f"There is no session '{session_id[:80]}': it was closed, or its service restarted.",
        reason=Reason.SESSION_LOST,
        remedy="Create a session and play the task again from its start.",
    )


def session_expired(session_id: str) -> NotFound:
    """The session was not used within its time to live."""
    return NotFound(
        f"Session '{session_id[:80]}' expired unused.",
        reason=Reason.SESSION_EXPIRED,
        remedy="Create a session with a longer ttl_s and play the task again.",
    )


def session_busy(session_id: str) -> Busy:
    """A step of the session is under way."""
    return Busy(
        f"Session '{session_id[:80]}' is at work on a step.",
        reason=Reason.SESSION_BUSY,
        remedy="Wait for its answer, or play in another session.",
    )


def session_conflict(session_id: str, environment: str) -> AlreadyExists:
    """The id is taken by a session of another environment."""
    return AlreadyExists(
        f"Session '{session_id[:80]}' is one of environment '{environment}'.",
        reason=Reason.SESSION_CONFLICT,
        remedy="Choose another session_id.",
    )


def no_capacity(capacity: int) -> CapacityExhausted:
    """All places are taken."""
    return CapacityExhausted(
        f"All {capacity} sessions are in use.",
        reason=Reason.CAPACITY,
        remedy="Close sessions, wait for some to expire, or raise the capacity.",
    )


def no_room(max_working: int) -> CapacityExhausted:
    """Too many steps are under way."""
    return CapacityExhausted(
        f"{max_working} steps are under way already.",
        reason=Reason.CAPACITY,
        remedy="Try again in a moment, or raise max_working_steps.",
    )


def unknown_environment(name: str, known: Iterable[str]) -> NotFound:
    """Nobody here has an environment of that name."""
    return NotFound(
        f"There is no environment '{name[:80]}'.",
        reason=Reason.ENVIRONMENT_NOT_FOUND,
        remedy=f"Choose one of: {', '.join(known)}.",
    )


def needs_session(environment: str) -> Unsupported:
    """The environment keeps what its histories do not tell."""
    return Unsupported(
        f"Environment {environment} is played in sessions only.",
        reason=Reason.NEEDS_SESSION,
        remedy="Create a session and step in it.",
    )


def step_conflict(what: str) -> PreconditionFailed:
    """The same place was asked for with other content before."""
    return PreconditionFailed(
        f"{what} was asked for before, with other content.",
        reason=Reason.STEP_CONFLICT,
        remedy="Retry with the same content, or go on to the next one.",
    )


def step_gap(what: str, expected: int) -> PreconditionFailed:
    """Something in between is missing."""
    return PreconditionFailed(
        f"{what} comes too early: the next one is {expected}.",
        reason=Reason.STEP_GAP,
        remedy="Take episodes and steps in order, starting with a reset.",
    )


def episode_done(episode: int) -> PreconditionFailed:
    """The episode takes no more steps."""
    return PreconditionFailed(
        f"Episode {episode} is over.",
        reason=Reason.EPISODE_DONE,
        remedy="Reset the session to start another.",
    )


def bad_value(name: str, remedy: str) -> InvalidInput:
    """A field is out of range."""
    return InvalidInput(f"{name} is out of range.", reason=Reason.OUT_OF_RANGE, remedy=remedy)
