"""What a session remembers: its episodes, and the first answer to every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from dialoop.environments import Answered, Environment, Episode, Opening, Outcome, TaskChoice
from dialoop.errors import DialoopError


class SessionState(Enum):
    """CREATED until the first reset, then PLAYING and DONE in turn."""

    CREATED = "created"
    PLAYING = "playing"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits(ttl_s=900, max_ttl_s=86400, capacity=4096, step_timeout_s=120, ...)."""

    ttl_s: float = 900.0
    max_ttl_s: float = 86_400.0
    capacity: int = 4096
    step_timeout_s: float = 120.0
    # A step whose callers all went away is cancelled after so long without a retry.
    abandon_s: float = 10.0
    max_working: int = 1024
    reap_interval_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetCall:
    """A reset as it was asked; the same call twice is a retry."""

    session_id: str
    episode: int
    choice: TaskChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """A step as it was asked; `digest` is of what the policy said, as it arrived."""

    session_id: str
    episode: int
    step_index: int
    answered: Answered
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step's outcome, and whether it is that of an earlier identical request."""

    outcome: Outcome
    replayed: bool


StepAndOpening = tuple[Taken, Opening | None]


@dataclass(slots=True)
class StoredStep:
    """The first request of a step index: its digest, and its work, done or under way.

    The work returns a bad request's error instead of raising it, so that it can live in the
    service's task group. `num_waiting` callers want its outcome; work that nobody wants any more is
    abandoned after a while.
    """

    digest: bytes
    work: asyncio.Task[Outcome | DialoopError]
    num_waiting: int = 0
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Cancel work that nobody came back for, and with it the tool that runs."""
        if not self.work.done() and not self.num_waiting:
            self.is_abandoned = True
            self.work.cancel()


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One episode of a session; changed by Sessions only."""

    asked: ResetCall
    opening: Opening
    episode: Episode
    steps: dict[int, StoredStep] = field(default_factory=dict)
    # Whether the environment was told that it takes no more steps.
    is_closed: bool = False

    @property
    def number(self) -> int:
        """Starts at 1."""
        return self.asked.episode

    @property
    def works(self) -> list[asyncio.Task[Outcome | DialoopError]]:
        """The steps under way; at most one."""
        return [step.work for step in self.steps.values() if not step.work.done()]


@dataclass(slots=True, kw_only=True)
class Session:
    """One client's place in one environment; changed by Sessions only.

    The episode before the running one is kept, so that a retried step_and_reset finds its answer.
    """

    session_id: str
    environment: Environment
    ttl_s: float
    expires_at: float
    current: EpisodeRecord | None = None
    previous: EpisodeRecord | None = None
    # The reset under way of an environment that opens slowly, and its work.
    opening: tuple[ResetCall, asyncio.Task[Opening | DialoopError]] | None = None

    @property
    def state(self) -> SessionState:
        """Where it stands."""
        if self.current is None:
            return SessionState.CREATED
        return SessionState.DONE if self.current.episode.done else SessionState.PLAYING

    @property
    def is_busy(self) -> bool:
        """Whether a step, or a reset that takes its time, is under way."""
        return self.opening is not None or (self.current is not None and bool(self.current.works))

    @property
    def episode_number(self) -> int:
        """The running episode; 0 before the first reset."""
        return self.current.number if self.current else 0

    def record_of(self, episode: int) -> EpisodeRecord | None:
        """The record of an episode that is still remembered."""
        records = (self.current, self.previous)
        return next((r for r in records if r is not None and r.number == episode), None)
