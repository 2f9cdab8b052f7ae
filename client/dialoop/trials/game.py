"""What a game is: states, prompts and moves, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Generic[S]):
    """What a game makes of an action."""

    state: S
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, str] = field(default_factory=dict)


class Game(Protocol[S]):
    """One kind of task; states are values, so trials cannot touch each other."""

    @property
    def max_steps(self) -> int:
        """Actions after which an episode ends whatever happens."""
        ...

    def begin(self, task: Mapping[str, Any], *, seed: int) -> S:
        """The state an episode starts from; the same task and seed give the same."""
        ...

    def prompt(self, state: S, step: int) -> str:
        """What the agent reads before its action number `step`."""
        ...

    async def play(self, state: S, action: str) -> Move[S]:
        """Take the agent's action."""
        ...
