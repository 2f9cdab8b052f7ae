"""Episodes that begin elsewhere, which takes its time: opened once, whoever asks again waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dialoop.environments import OpensSlowly, chosen_task, refusals
from dialoop.environments.failures import failure_of
from dialoop.environments.sessions.records import ResetCall
from dialoop.environments.sessions.step_order import require_next_episode
from dialoop.errors import DialoopError, Unavailable
from dialoop.trajectory import Owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.environments import Opening, TaskChoice, TaskData
    from dialoop.environments.sessions.records import Session
    from dialoop.environments.sessions.sessions import Sessions


class SlowOpenings:
    """Resets of environments that open slowly; the work belongs to the service, as a step's."""

    def __init__(self, sessions: Sessions, tasks: asyncio.TaskGroup, *, timeout_s: float) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._timeout_s = timeout_s

    async def opened(self, session: Session, call: ResetCall) -> Opening:
        """The opening; Busy (SESSION_BUSY) while another reset of the session is under way."""
        opening = self._sessions.opening_of(session, call)
        if opening is not None:
            return opening
        if session.opening is None:
            require_next_episode(session, call.episode)
            task, seed = chosen_task(session.environment, call.choice)
            work = self._tasks.create_task(self._open(session, call, task, seed))
            session.opening = (call, work)
        asked, work = session.opening
        if asked != call:
            raise refusals.session_busy(session.session_id)
        try:
            made = await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():  # the session was closed: no cancellation of ours
                raise refusals.session_lost(session.session_id) from None
            raise
        if isinstance(made, DialoopError):
            raise made
        return made

    async def group(
        self, sessions: Sequence[Session], choice: TaskChoice
    ) -> list[tuple[Session, Opening]]:
        """The first episode of each, all of one task; a retry opens what did not open before."""
        ids = [session.session_id for session in sessions]
        calls = [ResetCall(session_id=one, episode=1, choice=choice) for one in ids]
        openings = await asyncio.gather(*map(self._sessions.opened, calls))
        return list(zip(sessions, openings, strict=True))

    async def _open(
        self, session: Session, call: ResetCall, task: TaskData, seed: int
    ) -> Opening | DialoopError:
        """The work of a reset; closing the session cancels it."""
        environment: Any = session.environment
        try:
            made = await self._made(environment, task, seed)
            if isinstance(made, DialoopError):
                return made
            self._sessions.begin(session, call, made)
            return made
        finally:
            session.opening = None

    async def _made(
        self, environment: OpensSlowly, task: TaskData, seed: int
    ) -> Opening | DialoopError:
        """The opening, or why there is none: as a value, so that it can live in a task group."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await environment.open(task, seed)
        except DialoopError as error:
            return error
        except Exception as error:
            reason = "OPEN_TIMEOUT" if isinstance(error, TimeoutError) else "OPEN_FAILED"
            what = "Opening an episode"
            failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
            return Unavailable(failure.message, reason=reason, remedy="Try again.")
