"""The session engine: the one owner of all episodes that are being played.

    async with open_sessions(catalogue, limits) as sessions:
        sessions.create("mine", "arithmetic")
        opening = await sessions.reset(ResetCall(session_id="mine", episode=1, ...))
        played = await sessions.step(StepCall(session_id="mine", episode=1, step_index=0, ...))

All methods run on one event loop, and none awaits between a check and the change that depends on
it. The work of a step belongs to its session and not to the request, so a client that disconnects
gets the answer when it retries.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.chat import ChatHistory, History
from dialoop.environments import refusals
from dialoop.environments.environment import Environment, Managed, OpensSlowly, Stateless
from dialoop.environments.episode import Episode, Opening, Outcome, TaskData, stepping
from dialoop.environments.sessions.records import (
    AnsweredStep,
    EpisodeRecord,
    ResetCall,
    Session,
    SessionLimits,
    StepCall,
    StoredStep,
)
from dialoop.environments.sessions.snapshots import restore, take_snapshot
from dialoop.environments.tasks.choosing import (
    choose_task,
    prompt_of,
    require_choice,
    resolve_split,
)
from dialoop.errors import DialoopError, PreconditionFailed, Unavailable
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import Failure, Owner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable

    from dialoop.chat import Message
    from dialoop.environments.modes import Answered
    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.environments.tasks.choosing import TaskChoice
    from dialoop.episode import Resumed, SessionState

_MAX_ID = 200

T = TypeVar("T")
MAX_ADDED = 1 << 21
"""Most characters that a step may add to the conversation: no policy reads more."""


@asynccontextmanager
async def open_sessions(
    catalogue: Catalogue, limits: SessionLimits, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[SessionEngine]:
    """Run an engine with its reaper; leaving the context cancels every step under way."""
    sessions = SessionEngine(catalogue, limits, clock=clock)
    async with asyncio.TaskGroup() as beside:
        reaper = beside.create_task(sessions.reap_forever())
        try:
            yield sessions
        finally:
            reaper.cancel()
            await sessions.close_all()


class SessionEngine:
    """Creates, plays, expires and closes sessions; `open_sessions` gives one with a reaper."""

    def __init__(
        self,
        catalogue: Catalogue,
        limits: SessionLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._limits = limits
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        # Ids of expired sessions, oldest first; as many as there may be sessions.
        self._expired: dict[str, None] = {}
        self._num_working = 0
        # Slow resets and closings under way; the event loop itself keeps only weak references.
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session_id: str, environment: str, ttl_s: float | None = None) -> Session:
        """Open a session under the client's id, or return the one that it opened before."""
        if not 0 < len(session_id) <= _MAX_ID:
            raise refusals.bad_value("session_id", f"Choose 1 to {_MAX_ID} characters.")
        if ttl_s is not None and not 0 < ttl_s <= self._limits.max_ttl_s:
            raise refusals.bad_value(
                "ttl_s", f"Give seconds above 0, up to {self._limits.max_ttl_s:g}."
            )
        served = self._catalogue.get(environment)
        session_before = self._live_session(session_id, environment)
        if session_before is not None:
            self._touch(session_before)
            return session_before
        self._require_places(1)
        ttl_s = self._limits.ttl_s if ttl_s is None else ttl_s
        session = Session(session_id=session_id, environment=served, ttl_s=ttl_s, expires_at=0.0)
        self._touch(session)
        self._sessions[session_id] = session
        self._expired.pop(session_id, None)
        return session

    async def create_group(
        self,
        group_id: str,
        environment: str,
        num_sessions: int,
        choice: TaskChoice,
        ttl_s: float | None = None,
    ) -> list[tuple[Session, Opening]]:
        """Open sessions at the start of one task, all or none; a retry returns the same ones.

        If the environment opens slowly, a retry opens the ones that did not open before.
        """
        served = self._catalogue.get(environment)
        ids = self._places_of_group(group_id, environment, num_sessions)
        choice = resolve_split(served, choice)
        calls = [ResetCall(session_id=session_id, episode=1, choice=choice) for session_id in ids]
        if isinstance(served, OpensSlowly):
            sessions = [self.create(session_id, environment, ttl_s) for session_id in ids]
            openings = await asyncio.gather(*map(self.reset, calls))
            return list(zip(sessions, openings, strict=True))
        task, seed = self._task_of_group(served, calls)
        members = []
        for call in calls:
            session = self.create(call.session_id, environment, ttl_s)
            opening = session.opening_for(call)
            if opening is None:
                opening = _not_too_long(served, served.reset(task, seed))
                self._begin(session, call, opening)
            members.append((session, opening))
        return members

    async def reset(self, call: ResetCall) -> Opening:
        """Start an episode; a retry returns the first opening.

        Raise Busy (SESSION_BUSY) while another reset of the session is under way.
        """
        session = self.get(call.session_id)
        environment = session.environment
        call = replace(call, choice=resolve_split(environment, call.choice))
        opening = session.opening_for(call)
        if opening is not None:
            self._touch(session)
            return opening
        if session.slow_reset is None:
            session.require_next_episode(call.episode)
            task, seed = choose_task(environment, call.choice)
            if not isinstance(environment, OpensSlowly) and call.resumed is None:
                opening = _not_too_long(environment, environment.reset(task, seed))
                self._begin(session, call, opening)
                return opening
            work = self._start(self._open(session, environment, call, task, seed))
            session.slow_reset = (call, work)
        slow_call, work = session.slow_reset
        if slow_call != call:
            raise refusals.session_busy(session.session_id)
        await asyncio.wait((work,))  # a caller that is cancelled while it waits cancels no work
        return _result_of(work, session)

    async def step(self, call: StepCall) -> AnsweredStep:
        """Take the policy's answer; a retry returns the first outcome and runs no tool twice."""
        session = self.get(call.session_id)
        record = session.record_for(call)
        stored = record.steps.get(call.step_index)
        replayed = stored is not None
        if stored is None:
            self._require_room()
            stored = record.steps[call.step_index] = StoredStep(record.content_of(call))
            stored.work = asyncio.create_task(self._play(session, record, call))
            self._num_working += 1
            stored.work.add_done_callback(self._stop_working)
        outcome = stored.outcome or await self._wait_for(stored, session)
        self._touch(session)
        return AnsweredStep(call=call, record=record, outcome=outcome, replayed=replayed)

    async def step_and_reset(
        self, call: StepCall, following: ResetCall
    ) -> tuple[AnsweredStep, Opening | None]:
        """Step, and if the episode is then over, open the following one."""
        environment = self.get(call.session_id).environment
        require_choice(environment, following.choice)  # an unknown task must not cost a step
        played = await self.step(call)
        if not played.outcome.episode.done:
            return played, None
        return played, await self.reset(following)

    async def step_history(
        self, environment: str, choice: TaskChoice, answered: ChatHistory
    ) -> Outcome:
        """Take a step without a session, using only what the caller sent."""
        served = self._catalogue.get(environment)
        if not isinstance(served, Stateless):
            raise refusals.needs_session(environment)
        prompt = prompt_of(answered)
        task, seed = choose_task(served, choice)
        episode = served.resume(task, seed, prompt)
        self._require_room()
        self._num_working += 1
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                return await _try_step(served, episode, answered)
        except TimeoutError as error:
            return _failed_step(served, episode, answered, error)
        finally:
            self._num_working -= 1

    def get(self, session_id: str) -> Session:
        """Return the session; NotFound (SESSION_LOST, SESSION_EXPIRED)."""
        session = self._sessions.get(session_id)
        if session is not None and self._is_over(session):
            self._expire(session)
        if session_id in self._expired:
            raise refusals.session_expired(session_id)
        if session is None:
            raise refusals.session_lost(session_id)
        return session

    def state(self, session_id: str) -> SessionState:
        """Return the session's state; NotFound (SESSION_LOST, SESSION_EXPIRED)."""
        session = self.get(session_id)
        return session.state(expires_in_s=max(0.0, session.expires_at - self._clock()))

    def close(self, session_id: str) -> bool:
        """Forget the session and cancel its step under way; return whether there was a session."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        if session.slow_reset is not None:
            session.slow_reset[1].cancel()
        if session.current is not None:
            running = session.current.running
            if running is not None and running.work is not None:
                running.work.cancel()
            self._close_episode(session.environment, session.current, running)
        return True

    async def close_all(self) -> None:
        """Forget every session, and wait until the environments have closed their episodes."""
        for session_id in tuple(self._sessions):
            self.close(session_id)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def reap(self) -> None:
        """Expire the sessions whose time is over and that have no step under way."""
        for session in [s for s in self._sessions.values() if self._is_over(s)]:
            self._expire(session)

    async def reap_forever(self) -> None:
        """Reap at every interval."""
        while True:
            await asyncio.sleep(self._limits.reap_interval_s)
            self.reap()

    async def _wait_for(self, stored: StoredStep, session: Session) -> Outcome:
        """Wait for a step under way; it goes on if the caller is cancelled meanwhile."""
        work = stored.work
        assert work is not None
        stored.num_waiting += 1
        try:
            await asyncio.sleep(0)  # a quick environment has answered by now: it needs no timer
            if not work.done():
                stored.limit(self._limits.step_timeout_s)
                await asyncio.wait((work,))  # and not the work itself: see `reset`
        finally:
            stored.num_waiting -= 1
            if not stored.num_waiting and not work.done():
                loop = asyncio.get_running_loop()
                loop.call_later(self._limits.abandon_s, stored.abandon)
        return _result_of(work, session)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _touch(self, session: Session) -> None:
        session.expires_at = self._clock() + session.ttl_s

    def _is_over(self, session: Session) -> bool:
        return session.expires_at <= self._clock() and not session.is_busy

    def _expire(self, session: Session) -> None:
        self.close(session.session_id)
        self._expired[session.session_id] = None
        while len(self._expired) > self._limits.capacity:
            del self._expired[next(iter(self._expired))]

    def _live_session(self, session_id: str, environment: str) -> Session | None:
        """Return the live session with this id; AlreadyExists if it plays another environment."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        if self._is_over(session):
            self._expire(session)
            return None
        if session.environment.name != environment:
            raise refusals.session_conflict(session_id, session.environment.name)
        return session

    def _places_of_group(self, group_id: str, environment: str, num_sessions: int) -> list[str]:
        """Return the ids of a group's sessions; raise unless there is room for all of them."""
        if not group_id or not 0 < num_sessions <= self._limits.capacity:
            raise refusals.bad_value(
                "group_id or num_sessions", f"Give a name, and 1 to {self._limits.capacity}."
            )
        ids = [f"{group_id}.{number}" for number in range(num_sessions)]
        self._require_places(
            sum(self._live_session(session_id, environment) is None for session_id in ids)
        )
        return ids

    def _task_of_group(
        self, environment: Environment, calls: list[ResetCall]
    ) -> tuple[TaskData, int]:
        """Return the task of the members that already play it (in a retry), or a fresh one."""
        playing: list[Opening] = []
        for call in calls:
            session = self._live_session(call.session_id, environment.name)
            if session is None:
                continue
            opening = session.opening_for(call)
            if opening is None:
                session.require_next_episode(call.episode)
            else:
                playing.append(opening)
        if playing:
            return playing[0].episode.task, playing[0].episode.seed
        return choose_task(environment, calls[0].choice)

    def _require_places(self, number: int) -> None:
        if len(self._sessions) + number > self._limits.capacity:
            self.reap()
        if len(self._sessions) + number > self._limits.capacity:
            raise refusals.no_capacity(self._limits.capacity)

    def _require_room(self) -> None:
        if self._num_working >= self._limits.max_working:
            raise refusals.no_room(self._limits.max_working)

    def _begin(self, session: Session, call: ResetCall, opening: Opening) -> None:
        """Make the opened episode the session's current one."""
        if session.current is not None:
            self._close_episode(session.environment, session.current)
        session.previous = session.current
        session.current = EpisodeRecord(reset_call=call, opening=opening, episode=opening.episode)
        self._touch(session)

    async def _open(
        self,
        session: Session,
        environment: Environment,
        call: ResetCall,
        task: TaskData,
        seed: int,
    ) -> Opening | DialoopError:
        """Do the work of a slow reset; closing the session cancels it."""
        try:
            opening = await _open_within(
                self._limits.step_timeout_s, environment, task, seed, call.resumed
            )
            if not isinstance(opening, DialoopError):
                self._begin(session, call, opening)
            return opening
        finally:
            session.slow_reset = None

    async def _play(
        self, session: Session, record: EpisodeRecord, call: StepCall
    ) -> Outcome | DialoopError:
        """Do the work of one step; a bad request changes nothing."""
        environment = session.environment
        stored = record.steps[call.step_index]
        try:
            with stepping(f"{call.session_id}/{call.episode}/{call.step_index}"):
                outcome = await _try_step(environment, record.episode, call.answered)
            outcome = await take_snapshot(environment, outcome, self._limits.max_snapshot_bytes)
        except DialoopError as error:
            del record.steps[call.step_index]
            return error
        except asyncio.CancelledError as cancelled:
            task, cut_reason = asyncio.current_task(), stored.cut_reason
            if task is None or not cut_reason:
                raise
            task.uncancel()
            outcome = _cut_step(
                environment,
                record.episode,
                call.answered,
                reason=cut_reason,
                cancelled=cancelled,
            )
        stored.outcome = outcome
        record.episode = outcome.episode
        before = record.steps.get(call.step_index - 1)
        if before is not None and before.outcome is not None and before.outcome.snapshot:
            before.outcome = replace(before.outcome, snapshot=b"")
        if outcome.episode.done:
            self._close_episode(environment, record)
        self._touch(session)
        return outcome

    def _stop_working(self, _: object) -> None:
        self._num_working -= 1

    def _close_episode(
        self,
        environment: Environment,
        record: EpisodeRecord,
        running: StoredStep | None = None,
    ) -> None:
        """Tell the environment, once, that the episode takes no more steps."""
        if record.is_closed:
            return
        record.is_closed = True

        async def close() -> None:
            if running is not None and running.work is not None:
                await asyncio.wait((running.work,))
            await _tell_closed(environment, record.episode)

        self._start(close())


def _result_of(work: asyncio.Task[T | DialoopError], session: Session) -> T:
    """Return the result of finished work; NotFound (SESSION_LOST) if its session was closed."""
    if work.cancelled():
        raise refusals.session_lost(session.session_id)
    result = work.result()
    if isinstance(result, DialoopError):
        raise result
    return result


async def _open_within(
    timeout_s: float, environment: Environment, task: TaskData, seed: int, resumed: Resumed | None
) -> Opening | DialoopError:
    """Return the opening, or the error: OPEN_TIMEOUT, OPEN_FAILED or the environment's own."""
    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(environment, OpensSlowly):
                opening = await environment.open(task, seed)
            else:
                opening = environment.reset(task, seed)
            opening = _not_too_long(environment, opening)
            return opening if resumed is None else await restore(environment, opening, resumed)
    except DialoopError as error:
        return error
    except (Exception, asyncio.CancelledError) as error:
        _raise_if_cancelled(error)
        reason = Reason.OPEN_TIMEOUT if isinstance(error, TimeoutError) else Reason.OPEN_FAILED
        what = "Opening an episode"
        failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
        return Unavailable(failure.message, reason=reason, remedy="Try again.")


async def _try_step(environment: Environment, episode: Episode, answered: Answered) -> Outcome:
    """Return the environment's outcome; raise only for a bad `answered`."""
    try:
        outcome = await environment.step(episode, answered)
    except DialoopError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        _raise_if_cancelled(error)
        return _failed_step(environment, episode, answered, error)
    num_added = _num_characters(outcome.episode.history[len(episode.history) :])
    if num_added <= MAX_ADDED:
        return outcome
    failure = Failure(
        owner=Owner.ENVIRONMENT,
        reason=Reason.OUTPUT_TOO_LARGE,
        message=f"A step of {environment.name} added {num_added} characters; {MAX_ADDED} may be.",
    )
    return _without_response(episode, answered).fail(failure)


def _not_too_long(environment: Environment, opening: Opening) -> Opening:
    num_added = _num_characters(opening.episode.history)
    if num_added <= MAX_ADDED:
        return opening
    raise PreconditionFailed(
        f"An episode of {environment.name} opens with {num_added} characters; {MAX_ADDED} may be.",
        reason=Reason.OUTPUT_TOO_LARGE,
        remedy="Shorten the task, or what the environment says of it.",
    )


def _num_characters(messages: Iterable[Message]) -> int:
    return sum(len(message.text) for message in messages)


def _raise_if_cancelled(error: BaseException) -> None:
    """Raise a cancellation that somebody asked for; one of the environment's own is its failure."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _failed_step(
    environment: Environment, episode: Episode, answered: Answered, error: BaseException
) -> Outcome:
    """Return the outcome of a failed step: STEP_TIMEOUT for a TimeoutError, else STEP_FAILED."""
    reason = Reason.STEP_TIMEOUT if isinstance(error, TimeoutError) else Reason.STEP_FAILED
    what = f"Environment {environment.name}"
    failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
    return _without_response(episode, answered).fail(failure)


def _cut_step(
    environment: Environment,
    episode: Episode,
    answered: Answered,
    *,
    reason: str,
    cancelled: asyncio.CancelledError,
) -> Outcome:
    """Return the outcome of a step that was cancelled for STEP_TIMEOUT or STEP_CANCELLED.

    It is never scored, and no retry runs it again. For a time-out the log shows the stack trace.
    """
    what = f"Environment {environment.name}"
    failure = (
        failure_of(cancelled, owner=Owner.ENVIRONMENT, reason=reason, what=what)
        if reason == Reason.STEP_TIMEOUT
        else Failure(
            owner=Owner.ENVIRONMENT,
            reason=reason,
            message="The caller of this step disconnected and did not retry in time.",
        )
    )
    return _without_response(episode, answered).fail(failure)


async def _tell_closed(environment: Environment, episode: Episode) -> None:
    """Let the environment free what the episode holds; its errors are only logged."""
    if not isinstance(environment, Managed):
        return
    try:
        await environment.close(episode)
    except Exception as error:
        what = f"Closing an episode of {environment.name}"
        failure_of(error, owner=Owner.ENVIRONMENT, reason=Reason.CLOSE_FAILED, what=what)


def _without_response(episode: Episode, answered: Answered) -> Outcome:
    """Return the outcome of a step to which the environment added nothing."""
    if not isinstance(answered, ChatHistory):
        after = replace(episode, step_index=episode.step_index + 1)
        return Outcome(episode=after, response=History())
    response = answered.response or History()
    full = answered.full or episode.history.extend(response)
    after = replace(episode, history=full, step_index=episode.step_index + 1)
    return Outcome(episode=after, response=response)
