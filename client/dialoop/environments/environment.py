"""The protocols of an environment: what each must do, and what some can do besides.

Every environment follows Environment; ChatEnv is the one to start from. Callers look for the other
protocols with isinstance: Managed (holds resources), OpensSlowly (an episode begins elsewhere),
Stateless (can go on from a history alone), Snapshots (goes on elsewhere), TakesQuestions (plays a
question the caller brings). Demonstrations is for supervised training.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dialoop.chat import History, Message
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.modes import Answered
from dialoop.environments.tasks.source import TaskSource
from dialoop.environments.transform import Traits
from dialoop.trajectory import Trajectory

Shown = tuple[Message, ...]
Demonstrate = Callable[[TaskData, random.Random], Shown | Awaitable[Shown]]
"""A function, sync or async, of a task that returns the messages of a solution."""


class Environment(Protocol):
    """What the environment service serves; ChatEnv is the one to start from."""

    @property
    def name(self) -> str:
        """Return the name that tasks and sessions use for it."""

    @property
    def version(self) -> str:
        """Return the version; change it when the same answer may get another reward.

        Each trajectory records it.
        """

    @property
    def description(self) -> str:
        """Return one sentence for people."""

    @property
    def tasks(self) -> TaskSource:
        """Return the source of its tasks."""

    @property
    def traits(self) -> Traits:
        """Return its limits, stop strings, tools and reward names."""

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode; must be quick."""

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Answer a policy; raise only for a bad `answered`, before anything has happened."""

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """Return the rewards of a finished trajectory, one score per turn."""


@runtime_checkable
class Managed(Protocol):
    """An environment that holds resources: connections, processes, an interpreter per episode."""

    async def acquire(self) -> None:
        """Take what is needed before the first episode; on an error the service does not start."""

    async def release(self) -> None:
        """Give back what `acquire` took, after the last episode."""

    async def close(self, episode: Episode) -> None:
        """Free what an episode holds; called once, when the episode or its session is over."""

    def problem(self) -> str:
        """Return why the environment cannot work at the moment, or an empty text."""


@runtime_checkable
class OpensSlowly(Protocol):
    """An environment whose episodes begin elsewhere; callers use `open` instead of `reset`."""

    async def open(self, task: TaskData, seed: int) -> Opening:
        """Start an episode; raise Unavailable or CapacityExhausted when that is impossible now."""


@runtime_checkable
class Stateless(Protocol):
    """An environment that can go on from the messages alone."""

    def resume(self, task: TaskData, seed: int, prompt: History) -> Episode:
        """Return the episode whose next prompt is `prompt`.

        Raise Unsupported (NEEDS_SESSION) when the messages alone do not determine it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a caller brings in place of a task: Given(query="What is 3+4?")."""

    query: str = ""
    messages: History | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Return whether the caller brought nothing."""
        return not self.query and self.messages is None and not self.data


@runtime_checkable
class Snapshots(Protocol):
    """An environment with `redo` Redo.SNAPSHOT: its episodes go on in another process.

    Both methods may be async.
    """

    def snapshot(self, episode: Episode) -> bytes | Awaitable[bytes]:
        """Return what `restore` needs besides the messages; called after each step but the last."""

    def restore(self, episode: Episode, snapshot: bytes) -> Episode | Awaitable[Episode]:
        """Return the episode, which has its messages again, with all that it had; or raise."""


@runtime_checkable
class TakesQuestions(Protocol):
    """An environment that plays a question of the caller's."""

    def task_from(self, question: Given) -> TaskData:
        """Return the caller's question as a task; InvalidInput (DATA_KEY_MISSING) without one."""


class Demonstrations(Protocol):
    """Whole conversations that supervised training learns from."""

    def demonstration(self, task: TaskData, rng: random.Random) -> History:
        """Return a conversation that solves the task, from the prompt to the last answer."""
