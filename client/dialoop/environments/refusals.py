"""The errors of sessions, in the environment service and in process. Each has a remedy."""

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
    """Return the error for a session that does not exist here."""
    return NotFound(
        f"There is no session '{session_id[:80]}': it was closed, or its service restarted.",
        reason=Reason.SESSION_LOST,
        remedy="Create a session and play the task again from its start.",
    )


def session_expired(session_id: str) -> NotFound:
    """Return the error for a session that was not used within its time to live."""
    return NotFound(
        f"Session '{session_id[:80]}' expired unused.",
        reason=Reason.SESSION_EXPIRED,
        remedy="Create a session with a longer ttl_s and play the task again.",
    )


def session_busy(session_id: str) -> Busy:
    """Return the error for a session whose step or reset is under way."""
    return Busy(
        f"Session '{session_id[:80]}' is still working on another call.",
        reason=Reason.SESSION_BUSY,
        remedy="Wait for its answer, or play in another session.",
    )


def session_conflict(session_id: str, environment: str) -> AlreadyExists:
    """Return the error for an id that a session of another environment has."""
    return AlreadyExists(
        f"Session '{session_id[:80]}' exists already, in environment '{environment}'.",
        reason=Reason.SESSION_CONFLICT,
        remedy="Choose another session_id.",
    )


def no_capacity(capacity: int) -> CapacityExhausted:
    """Return the error for a new session when all places are taken."""
    return CapacityExhausted(
        f"All {capacity} sessions are in use.",
        reason=Reason.CAPACITY,
        remedy="Close sessions, wait for some to expire, or raise the capacity.",
    )


def no_room(max_working: int) -> CapacityExhausted:
    """Return the error for a step when too many are under way."""
    return CapacityExhausted(
        f"{max_working} steps are already under way, which is the limit.",
        reason=Reason.CAPACITY,
        remedy="Try again in a moment, or raise max_working_steps.",
    )


def unknown_environment(name: str, names: Iterable[str]) -> NotFound:
    """Return the error for a name that no environment here has."""
    return NotFound(
        f"There is no environment '{name[:80]}'.",
        reason=Reason.ENVIRONMENT_NOT_FOUND,
        remedy=f"Choose one of: {', '.join(names)}.",
    )


def needs_session(environment: str) -> Unsupported:
    """Return the error for a step without a session where the messages alone are not enough."""
    return Unsupported(
        f"Environment {environment} can be played only in a session.",
        reason=Reason.NEEDS_SESSION,
        remedy="Create a session and step in it.",
    )


def step_conflict(what: str) -> PreconditionFailed:
    """Return the error for an episode or step that was requested before with other content."""
    return PreconditionFailed(
        f"{what} was requested before with other content.",
        reason=Reason.STEP_CONFLICT,
        remedy="Retry with the same content, or go on to the next one.",
    )


def step_gap(what: str, expected: int) -> PreconditionFailed:
    """Return the error for an episode or step that skips earlier ones."""
    return PreconditionFailed(
        f"{what} comes too early: the next one is {expected}.",
        reason=Reason.STEP_GAP,
        remedy="Take episodes and steps in order, starting with a reset.",
    )


def episode_done(episode: int) -> PreconditionFailed:
    """Return the error for a step of an episode that is over."""
    return PreconditionFailed(
        f"Episode {episode} is over.",
        reason=Reason.EPISODE_DONE,
        remedy="Reset the session to start another.",
    )


def bad_value(name: str, remedy: str) -> InvalidInput:
    """Return the error for a field that is out of range."""
    return InvalidInput(f"{name} is out of range.", reason=Reason.OUT_OF_RANGE, remedy=remedy)
