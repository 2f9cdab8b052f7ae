"""What the environment service serves, and what an environment may be able to do besides.

Environment is what every one must do; ChatEnv is the one to start from. The other protocols are
asked for with isinstance: Managed (holds things), OpensSlowly (an episode begins elsewhere),
Stateless (can go on from a history alone), TakesQuestions (plays a question the caller brings),
Demonstrations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dialoop.chat import History, Message
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.modes import Answered
from dialoop.environments.tasks.source import TaskSource
from dialoop.environments.transform import Traits
from dialoop.trajectory import Trajectory

Demonstrate = Callable[[TaskData, random.Random], tuple[Message, ...]]


class Environment(Protocol):
    """What the environment service serves; ChatEnv is the one to start from."""

    @property
    def name(self) -> str:
        """What tasks and sessions call it."""
        ...

    @property
    def version(self) -> str:
        """Recorded with every trajectory; change it when the same answer may get another reward."""
        ...

    @property
    def description(self) -> str:
        """One sentence for people."""
        ...

    @property
    def tasks(self) -> TaskSource:
        """Where its tasks come from."""
        ...

    @property
    def traits(self) -> Traits:
        """Limits, stop strings, tools and reward names."""
        ...

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode; must be quick."""
        ...

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Answer a policy; raises only for a bad `answered`, and then nothing has happened."""
        ...

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """The rewards of a finished trajectory, one score per turn."""
        ...


@runtime_checkable
class Managed(Protocol):
    """An environment that holds things: connections, processes, one interpreter per episode."""

    async def acquire(self) -> None:
        """Take what is needed before the first episode; an error here keeps the service down."""
        ...

    async def release(self) -> None:
        """Give it back after the last episode."""
        ...

    async def close(self, episode: Episode) -> None:
        """Free what an episode holds; called once, when it is over or its session is."""
        ...

    def problem(self) -> str:
        """Why it cannot work at the moment; empty while all is well."""
        ...


@runtime_checkable
class OpensSlowly(Protocol):
    """An environment whose episodes begin elsewhere; asked in the place of `reset`."""

    async def open(self, task: TaskData, seed: int) -> Opening:
        """Start an episode; Unavailable or CapacityExhausted where that cannot be done now."""
        ...


@runtime_checkable
class Stateless(Protocol):
    """An environment that can go on from the messages alone."""

    def resume(self, task: TaskData, seed: int, prompt: History) -> Episode:
        """The episode that stands at `prompt`; Unsupported (NEEDS_SESSION) where that is lost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a caller brings in place of a task: Given(query="What is 3+4?")."""

    query: str = ""
    messages: History | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was brought."""
        return not self.query and self.messages is None and not self.data


@runtime_checkable
class TakesQuestions(Protocol):
    """An environment that plays what the caller asks."""

    def task_from(self, given: Given) -> TaskData:
        """The task in what was given; InvalidInput (DATA_KEY_MISSING) when there is none in it."""
        ...


class Demonstrations(Protocol):
    """Whole conversations to learn from before any reward: what supervised training reads."""

    def demonstration(self, task: TaskData, rng: random.Random) -> History:
        """A conversation that solves the task, from the prompt to the last answer."""
        ...
