"""The protocol of a game: states, prompts and moves are values."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Generic[S]):
    """The result of an action: the next state, the reward, and whether the game is over."""

    state: S
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, str] = field(default_factory=dict)


class Game(Protocol[S]):
    """One kind of task. States are values, so trials share nothing.

    Each method may be async. A sync `play` runs in a thread of its own, so trials do not wait for
    each other.
    """

    @property
    def max_steps(self) -> int:
        """Return after how many actions an episode ends in any case."""
        ...

    def begin(self, task: Mapping[str, Any], *, seed: int) -> S | Awaitable[S]:
        """Return the first state of an episode, the same for the same task and seed."""
        ...

    def prompt(self, state: S, step: int) -> str | Awaitable[str]:
        """Return what the agent reads before its action number `step`."""
        ...

    def play(self, state: S, action: str) -> Move[S] | Awaitable[Move[S]]:
        """Take the agent's action."""
        ...
