"""Sessions: the one owner of all episodes that are being played.

    async with open_sessions(catalogue, limits) as sessions:
        sessions.create("mine", "arithmetic")
        opening = sessions.reset(ResetCall(session_id="mine", episode=1, ...))
        answered = await sessions.step(StepCall(session_id="mine", episode=1, step_index=0, ...))

All methods run on one event loop, and what they check and change they do without awaiting in
between. The work of a step belongs to the service and not to the request: a client that goes away
finds its answer when it asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory, History
from dialoop.environments import Environment, Episode, Opening, Outcome
from dialoop.environments.failures import failure_of
from dialoop.errors import DialoopError
from dialoop.trajectory import Owner

from services.environment import refusals
from services.environment.records import (
    Answered,
    EpisodeRecord,
    ResetCall,
    Session,
    StepCall,
    StoredStep,
)

if TYPE_CHECKING:
    from services.environment.catalogue import Catalogue

_MAX_ID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits(ttl_s=900, max_ttl_s=86400, capacity=4096, step_timeout_s=120, ...)."""

    ttl_s: float = 900.0
    max_ttl_s: float = 86_400.0
    capacity: int = 4096
    step_timeout_s: float = 120.0
    reap_interval_s: float = 1.0


@asynccontextmanager
async def open_sessions(
    catalogue: Catalogue, limits: Limits, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Sessions]:
    """Sessions with their reaper; leaving cancels every step under way."""
    async with asyncio.TaskGroup() as tasks:
        sessions = Sessions(catalogue, limits, tasks, clock=clock)
        reaper = tasks.create_task(sessions.reap_forever())
        try:
            yield sessions
        finally:
            reaper.cancel()
            sessions.close_all()


class Sessions:
    """Creates, plays, expires and closes sessions; make one with `open_sessions`."""

    def __init__(
        self,
        catalogue: Catalogue,
        limits: Limits,
        tasks: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._catalogue = catalogue
        self._limits = limits
        self._tasks = tasks
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        # Ids of expired sessions, oldest first; as many as there may be sessions.
        self._expired: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session_id: str, environment: str, ttl_s: float | None = None) -> Session:
        """Open a session under the client's id, or find the one it opened before."""
        if not 0 < len(session_id) <= _MAX_ID:
            raise refusals.bad_value("session_id", f"Choose 1 to {_MAX_ID} characters.")
        if ttl_s is not None and not 0 < ttl_s <= self._limits.max_ttl_s:
            raise refusals.bad_value(
                "ttl_s", f"Give seconds above 0, up to {self._limits.max_ttl_s:g}."
            )
        served = self._catalogue.get(environment)
        self.reap()
        known = self._sessions.get(session_id)
        if known is not None:
            if known.environment.name != environment:
                raise refusals.session_conflict(session_id, known.environment.name)
            self._touch(known)
            return known
        if len(self._sessions) >= self._limits.capacity:
            raise refusals.no_capacity(self._limits.capacity)
        ttl_s = self._limits.ttl_s if ttl_s is None else ttl_s
        session = Session(session_id=session_id, environment=served, ttl_s=ttl_s, expires_at=0.0)
        self._touch(session)
        self._sessions[session_id] = session
        self._expired.pop(session_id, None)
        return session

    def reset(self, call: ResetCall) -> Opening:
        """Start an episode; a retry gets the first opening."""
        session = self.get(call.session_id)
        call = replace(call, split=session.environment.tasks.require_split(call.split))
        record = session.record_of(call.episode)
        if record is not None:
            if record.asked != call:
                raise refusals.step_conflict(f"Episode {call.episode}")
            self._touch(session)
            return record.opening
        self._require_next_episode(session, call.episode)
        task = session.environment.tasks.get(call.split, call.task_key)
        opening = session.environment.reset(task, call.seed)
        session.previous = session.current
        session.current = EpisodeRecord(asked=call, opening=opening, episode=opening.episode)
        self._touch(session)
        return opening

    async def step(self, call: StepCall) -> Answered:
        """Take the policy's answer; a retry gets the first outcome and runs no tool twice."""
        session = self.get(call.session_id)
        record = self._record_for(session, call)
        stored = record.steps.get(call.step_index)
        replayed = stored is not None
        if stored is None:
            work = self._tasks.create_task(self._play(session, record, call))
            stored = record.steps[call.step_index] = StoredStep(call.digest, work)
        outcome = await self._wait(session, stored.work)
        self._touch(session)
        return Answered(outcome=outcome, replayed=replayed)

    async def step_and_reset(self, call: StepCall, following: ResetCall) -> StepAndOpening:
        """Step, and where that ends the episode open the following one."""
        tasks = self.get(call.session_id).environment.tasks
        tasks.get(following.split, following.task_key)  # an unknown task must not cost a step
        answered = await self.step(call)
        if not answered.outcome.episode.done:
            return answered, None
        return answered, self.reset(following)

    def get(self, session_id: str) -> Session:
        """The session; NotFound (SESSION_LOST, SESSION_EXPIRED)."""
        session = self._sessions.get(session_id)
        if session is not None and self._is_over(session):
            self._expire(session)
        if session_id in self._expired:
            raise refusals.session_expired(session_id)
        if session is None:
            raise refusals.session_lost(session_id)
        return session

    def expires_in_s(self, session: Session) -> float:
        """Seconds until it expires unless it is used."""
        return max(0.0, session.expires_at - self._clock())

    def close(self, session_id: str) -> bool:
        """Forget the session and cancel its step under way; whether there was one."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        for work in session.current.works if session.current else ():
            work.cancel()
        return True

    def close_all(self) -> None:
        """Forget every session."""
        for session_id in tuple(self._sessions):
            self.close(session_id)

    def reap(self) -> None:
        """Expire the sessions whose time is over; one with a step under way is not."""
        for session in [s for s in self._sessions.values() if self._is_over(s)]:
            self._expire(session)

    async def reap_forever(self) -> None:
        """Reap at every interval."""
        while True:
            await asyncio.sleep(self._limits.reap_interval_s)
            self.reap()

    def _touch(self, session: Session) -> None:
        session.expires_at = self._clock() + session.ttl_s

    def _is_over(self, session: Session) -> bool:
        return session.expires_at <= self._clock() and not session.is_busy

    def _expire(self, session: Session) -> None:
        self.close(session.session_id)
        self._expired[session.session_id] = None
        while len(self._expired) > self._limits.capacity:
            del self._expired[next(iter(self._expired))]

    def _require_next_episode(self, session: Session, episode: int) -> None:
        following = session.episode_number + 1
        if episode < 1:
            raise refusals.bad_value("episode", "Episodes start at 1.")
        if episode < following:
            raise refusals.step_conflict(f"Episode {episode}")
        if episode > following:
            raise refusals.step_gap(f"Episode {episode}", following)
        if session.is_busy:
            raise refusals.session_busy(session.session_id)

    def _record_for(self, session: Session, call: StepCall) -> EpisodeRecord:
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

    async def _wait(self, session: Session, work: asyncio.Task[Outcome | DialoopError]) -> Outcome:
        try:
            outcome = await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():  # the session was closed, which is not a cancellation of ours
                raise refusals.session_lost(session.session_id) from None
            raise
        if isinstance(outcome, DialoopError):
            raise outcome
        return outcome

    async def _play(
        self, session: Session, record: EpisodeRecord, call: StepCall
    ) -> Outcome | DialoopError:
        """The work of one step; a bad request leaves everything as it was."""
        try:
            outcome = await self._outcome(session.environment, record.episode, call.answered)
        except DialoopError as error:
            del record.steps[call.step_index]
            return error
        record.episode = outcome.episode
        self._touch(session)
        return outcome

    async def _outcome(
        self, environment: Environment, episode: Episode, answered: ChatHistory
    ) -> Outcome:
        what = f"Environment {environment.name}"
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                return await environment.step(episode, answered)
        except DialoopError:
            raise
        except Exception as error:
            reason = "STEP_TIMEOUT" if isinstance(error, TimeoutError) else "STEP_FAILED"
            failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
            return _unanswered(episode, answered).fail(failure)


StepAndOpening = tuple[Answered, Opening | None]


def _unanswered(episode: Episode, answered: ChatHistory) -> Outcome:
    """The outcome of a step in which the environment added nothing."""
    response = answered.response or History()
    full = answered.full or episode.history.extend(response)
    after = replace(episode, history=full, step_index=episode.step_index + 1)
    return Outcome(episode=after, response=response)
