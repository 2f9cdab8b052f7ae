"""Many inference replicas as one policy, and an environment that may be away for a while."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.clients.errors import is_worth_retrying
from dialoop.errors import DialoopError

from dialoop_services.runtime.retry import Patience, patiently, service_away

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

    from dialoop.chat import ChatHistory, History
    from dialoop.episode import Policy, ResetResult, Sample, Sessions, StepResult
    from dialoop.sequences import Sequence
    from dialoop.trajectory import SamplingParams


# The trainer has the replica's device, for as long as its step takes: that is no outage.
_ASLEEP = "ASLEEP"


@dataclass(slots=True)
class _Replica:
    """A replica and how it has been: left alone until `back_at` after it failed."""

    policy: Policy
    num_failures: int = 0
    back_at: float = 0.0


class Replicas:
    """Asks replicas in turn; one that is away or not ready is left alone for a growing while.

    A sample has no side effect, so a request that a killed replica never answered simply goes to
    the next one. Satisfies `dialoop.episode.Policy`.
    """

    def __init__(self, policies: Several[Policy], patience: Patience) -> None:
        self._replicas = [_Replica(policy) for policy in policies]
        self._turn = itertools.count()
        self._patience = patience

    async def generate(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Answer on the first replica that can; Unavailable (SERVICE_AWAY) when none does."""
        ends_at = time.monotonic() + self._patience.total_s
        while True:
            replica = await self._next_replica()
            try:
                samples = await replica.policy.generate(
                    history,
                    context=context,
                    num_context_messages=num_context_messages,
                    sampling=sampling,
                    turn=turn,
                    num_samples=num_samples,
                )
            except DialoopError as error:
                if not is_worth_retrying(error):
                    raise
                self._set_aside(replica)
                if error.reason == _ASLEEP:
                    ends_at = time.monotonic() + self._patience.total_s
                if time.monotonic() > ends_at:
                    raise service_away(error) from error
            else:
                replica.num_failures, replica.back_at = 0, 0.0
                return samples

    async def _next_replica(self) -> _Replica:
        """The next in turn that is not set aside, or the first that comes back."""
        start = next(self._turn)
        count = len(self._replicas)
        ordered = [self._replicas[(start + i) % count] for i in range(count)]
        now = time.monotonic()
        for replica in ordered:
            if replica.back_at <= now:
                return replica
        soonest = min(ordered, key=lambda replica: replica.back_at)
        await asyncio.sleep(soonest.back_at - now)
        return soonest

    def _set_aside(self, replica: _Replica) -> None:
        now = time.monotonic()
        if replica.back_at > now:
            return  # another request of ours noticed the same outage
        replica.num_failures += 1
        replica.back_at = now + self._patience.pause_s(replica.num_failures)


class PatientSessions:
    """An environment whose absence is waited out; every call there may be repeated.

    Satisfies `dialoop.episode.Sessions`.
    """

    def __init__(self, sessions: Sessions, patience: Patience) -> None:
        self._sessions = sessions
        self._patience = patience

    async def create_session(self, session_id: str, environment: str) -> float:
        """Open a session; also waits for one to be free."""
        return await patiently(
            lambda: self._sessions.create_session(session_id, environment), self._patience
        )

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> ResetResult:
        """Start an episode."""
        return await patiently(
            lambda: self._sessions.reset(
                session_id, episode=episode, split=split, task_key=task_key, seed=seed
            ),
            self._patience,
        )

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """Take the policy's answer; a repeated step gets the first answer."""
        return await patiently(
            lambda: self._sessions.step(
                session_id, episode=episode, step_index=step_index, history=history
            ),
            self._patience,
        )

    async def close_session(self, session_id: str) -> bool:
        """Forget the session; not worth waiting for, the environment reaps it."""
        return await self._sessions.close_session(session_id)
