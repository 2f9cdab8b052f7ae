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
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory
from dialoop.environments import (
    Environment,
    Opening,
    OpensSlowly,
    Outcome,
    Stateless,
    TaskChoice,
    TaskData,
    chosen_task,
    refusals,
)
from dialoop.environments.sessions.records import (
    EpisodeRecord,
    Limits,
    ResetCall,
    Session,
    StepAndOpening,
    StepCall,
    StoredStep,
    Taken,
)
from dialoop.environments.sessions.slow_resets import SlowOpenings
from dialoop.environments.sessions.step_order import record_for, require_next_episode
from dialoop.environments.sessions.stepping import abandoned, closed, stepped
from dialoop.environments.tasks.choosing import prompt_of, require_choice, settled
from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from dialoop.environments.sessions.catalogue import Catalogue

_MAX_ID = 200


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
        self._num_working = 0
        self._openings = SlowOpenings(self, tasks, timeout_s=limits.step_timeout_s)

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
        known = self._known(session_id, environment)
        if known is not None:
            self._touch(known)
            return known
        self._require_places(1)
        ttl_s = self._limits.ttl_s if ttl_s is None else ttl_s
        session = Session(session_id=session_id, environment=served, ttl_s=ttl_s, expires_at=0.0)
        self._touch(session)
        self._sessions[session_id] = session
        self._expired.pop(session_id, None)
        return session

    def create_group(
        self,
        group_id: str,
        environment: str,
        num_sessions: int,
        choice: TaskChoice,
        ttl_s: float | None = None,
    ) -> list[tuple[Session, Opening]]:
        """Sessions at the start of one task, all of them or none; a retry finds the same ones."""
        ids = self._places_of_group(group_id, environment, num_sessions)
        fresh = [one for one in ids if self._known(one, environment) is None]
        served = self._catalogue.get(environment)
        choice = settled(served, choice)
        calls = [ResetCall(session_id=one, episode=1, choice=choice) for one in ids]
        known = [self._opening_of_member(call) for call in calls if call.session_id not in fresh]
        playing = next((opening.episode for opening in known if opening), None)
        if playing is None:
            task, seed = chosen_task(served, choice)
        else:  # a retry: whoever is missing joins the others' task
            task, seed = playing.task, playing.seed
        found = []
        for call in calls:
            session = self.create(call.session_id, environment, ttl_s)
            opening = self.opening_of(session, call) or self._open(session, call, task, seed)
            found.append((session, opening))
        return found

    def reset(self, call: ResetCall) -> Opening:
        """Start an episode; a retry gets the first opening."""
        session = self.get(call.session_id)
        call = replace(call, choice=settled(session.environment, call.choice))
        opening = self.opening_of(session, call)
        if opening is not None:
            return opening
        require_next_episode(session, call.episode)
        task, seed = chosen_task(session.environment, call.choice)
        return self._open(session, call, task, seed)

    async def opened(self, call: ResetCall) -> Opening:
        """`reset`, waiting for an environment that opens slowly."""
        session = self.get(call.session_id)
        if not isinstance(session.environment, OpensSlowly):
            return self.reset(call)
        choice = settled(session.environment, call.choice)
        return await self._openings.opened(session, replace(call, choice=choice))

    async def opened_group(
        self,
        group_id: str,
        environment: str,
        num_sessions: int,
        choice: TaskChoice,
        ttl_s: float | None = None,
    ) -> list[tuple[Session, Opening]]:
        """`create_group`, waiting for an environment that opens slowly."""
        if not isinstance(self._catalogue.get(environment), OpensSlowly):
            return self.create_group(group_id, environment, num_sessions, choice, ttl_s)
        ids = self._places_of_group(group_id, environment, num_sessions)
        return await self._openings.group(
            [self.create(one, environment, ttl_s) for one in ids], choice
        )

    async def step(self, call: StepCall) -> Taken:
        """Take the policy's answer; a retry gets the first outcome and runs no tool twice."""
        session = self.get(call.session_id)
        record = record_for(session, call)
        stored = record.steps.get(call.step_index)
        replayed = stored is not None
        if stored is None:
            self._require_room()
            work = self._tasks.create_task(self._play(session, record, call))
            stored = record.steps[call.step_index] = StoredStep(call.digest, work)
        outcome = await self._wait(session, stored)
        self._touch(session)
        return Taken(outcome=outcome, replayed=replayed)

    async def step_and_reset(self, call: StepCall, following: ResetCall) -> StepAndOpening:
        """Step, and where that ends the episode open the following one."""
        environment = self.get(call.session_id).environment
        require_choice(environment, following.choice)  # an unknown task must not cost a step
        taken = await self.step(call)
        if not taken.outcome.episode.done:
            return taken, None
        return taken, await self.opened(following)

    async def step_history(
        self, environment: str, choice: TaskChoice, answered: ChatHistory
    ) -> Outcome:
        """A step without a session, from what the caller sent alone."""
        served = self._catalogue.get(environment)
        if not isinstance(served, Stateless):
            raise refusals.needs_session(environment)
        prompt = prompt_of(answered)
        task, seed = chosen_task(served, choice)
        episode = served.resume(task, seed, prompt)
        self._require_room()
        self._num_working += 1
        try:
            limit_s = self._limits.step_timeout_s
            return await stepped(served, episode, answered, timeout_s=limit_s)
        finally:
            self._num_working -= 1

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
        if session.opening is not None:
            session.opening[1].cancel()
        if session.current is not None:
            works = session.current.works
            for work in works:
                work.cancel()
            self._close_episode(session.environment, session.current, works)
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

    def _known(self, session_id: str, environment: str) -> Session | None:
        """The session that has the id already; AlreadyExists when it plays something else."""
        known = self._sessions.get(session_id)
        if known is not None and known.environment.name != environment:
            raise refusals.session_conflict(session_id, known.environment.name)
        return known

    def _places_of_group(self, group_id: str, environment: str, num_sessions: int) -> list[str]:
        """The ids of a group's sessions, for all of which there is room."""
        if not group_id or not 0 < num_sessions <= self._limits.capacity:
            raise refusals.bad_value(
                "group_id or num_sessions", f"Give a name, and 1 to {self._limits.capacity}."
            )
        ids = [f"{group_id}.{number}" for number in range(num_sessions)]
        self.reap()
        self._require_places(sum(self._known(one, environment) is None for one in ids))
        return ids

    def _require_places(self, number: int) -> None:
        if len(self._sessions) + number > self._limits.capacity:
            raise refusals.no_capacity(self._limits.capacity)

    def _require_room(self) -> None:
        if self._num_working >= self._limits.max_working:
            raise refusals.no_room(self._limits.max_working)

    def _opening_of_member(self, call: ResetCall) -> Opening | None:
        """The opening of a session that was there before, or the right to open one in it."""
        session = self._sessions[call.session_id]
        opening = self.opening_of(session, call)
        if opening is None:
            require_next_episode(session, call.episode)
        return opening

    def opening_of(self, session: Session, call: ResetCall) -> Opening | None:
        """The opening that the same reset got before."""
        record = session.record_of(call.episode)
        if record is None:
            return None
        if record.asked != call:
            raise refusals.step_conflict(f"Episode {call.episode}")
        self._touch(session)
        return record.opening

    def _open(self, session: Session, call: ResetCall, task: TaskData, seed: int) -> Opening:
        opening = session.environment.reset(task, seed)
        self.begin(session, call, opening)
        return opening

    def begin(self, session: Session, call: ResetCall, opening: Opening) -> None:
        """The opened episode is the session's from now on."""
        if session.current is not None:
            self._close_episode(session.environment, session.current)
        session.previous = session.current
        session.current = EpisodeRecord(asked=call, opening=opening, episode=opening.episode)
        self._touch(session)

    def _close_episode(
        self,
        environment: Environment,
        record: EpisodeRecord,
        works: list[asyncio.Task[Outcome | DialoopError]] | None = None,
    ) -> None:
        """Tell the environment, once, that the episode takes no more steps."""
        if record.is_closed:
            return
        record.is_closed = True
        if not getattr(environment, "holds_episodes", True):
            return

        async def close() -> None:
            if works:
                await asyncio.wait(works)
            await closed(environment, record.episode)

        self._tasks.create_task(close())

    async def _wait(self, session: Session, stored: StoredStep) -> Outcome:
        stored.num_waiting += 1
        try:
            outcome = await asyncio.shield(stored.work)
        except asyncio.CancelledError:
            if stored.work.cancelled():  # the session was closed: no cancellation of ours
                raise refusals.session_lost(session.session_id) from None
            raise
        finally:
            stored.num_waiting -= 1
            if not stored.num_waiting and not stored.work.done():
                loop = asyncio.get_running_loop()
                loop.call_later(self._limits.abandon_s, stored.abandon)
        if isinstance(outcome, DialoopError):
            raise outcome
        return outcome

    async def _play(
        self, session: Session, record: EpisodeRecord, call: StepCall
    ) -> Outcome | DialoopError:
        """The work of one step; a bad request leaves everything as it was."""
        self._num_working += 1
        try:
            outcome = await stepped(
                session.environment,
                record.episode,
                call.answered,
                timeout_s=self._limits.step_timeout_s,
            )
        except DialoopError as error:
            del record.steps[call.step_index]
            return error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not record.steps[call.step_index].is_abandoned:
                raise
            task.uncancel()
            outcome = abandoned(record.episode, call.answered)
        finally:
            self._num_working -= 1
        record.episode = outcome.episode
        if outcome.episode.done:
            self._close_episode(session.environment, record)
        self._touch(session)
        return outcome
