"""Episodes and steps in order: what may be taken, what is a retry, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dialoop.environments import refusals

if TYPE_CHECKING:
    from dialoop.environments.sessions.records import EpisodeRecord, Session, StepCall


def require_next_episode(session: Session, episode: int) -> None:
    """Raise unless a reset may open this episode now."""
    following = session.episode_number + 1
    if episode < 1:
        raise refusals.bad_value("episode", "Episodes start at 1.")
    if episode < following:
        raise refusals.step_conflict(f"Episode {episode}")
    if episode > following:
        raise refusals.step_gap(f"Episode {episode}", following)
    if session.is_busy:
        raise refusals.session_busy(session.session_id)


def record_for(session: Session, call: StepCall) -> EpisodeRecord:
    """The episode a step belongs to, once it is known that it may be taken or replayed."""
    if call.step_index < 0 or call.episode < 1:
        raise refusals.bad_value("episode or step_index", "They start at 1 and at 0.")
    record = session.record_of(call.episode)
    if record is None and call.episode <= session.episode_number:
        raise refusals.episode_done(call.episode)
    if record is None:
        raise refusals.step_gap(f"Episode {call.episode}", session.episode_number + 1)
    stored = record.steps.get(call.step_index)
    if stored is not None and stored.digest == call.digest:
        return record
    if record.works:
        raise refusals.session_busy(session.session_id)
    if stored is not None:
        raise refusals.step_conflict(f"Step {call.step_index}")
    if record.episode.done or record is not session.current:
        raise refusals.episode_done(call.episode)
    if call.step_index != len(record.steps):
        raise refusals.step_gap(f"Step {call.step_index}", len(record.steps))
    return record
