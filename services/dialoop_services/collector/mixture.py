"""Draw the environment of each training task, where a job trains on several.

mixture = Mixture((TaskStream(environment="a"), TaskStream(environment="b", weight=3.0)), seed=1)
mixture.draws(0, 4)      # [1, 1, 0, 0]: a pure function of the seed and the position
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from dialoop.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStream:
    """The tasks of one split of an environment, and the weight with which they are drawn."""

    environment: str
    split: str = "train"
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Return the stream's name in a cursor."""
        return f"{self.environment}/{self.split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A job's position in its tasks: how many were drawn, and the page token of each stream."""

    position: int = 0
    tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, first: TaskStream) -> Cursor:
        """Parse a cursor, or the page token of a job that had one environment only."""
        if not text.startswith("{"):
            return cls(tokens={first.name: text} if text else {})
        fields = json.loads(text)
        return cls(position=fields["position"], tokens=fields["tokens"])

    def __str__(self) -> str:
        return json.dumps({"position": self.position, "tokens": dict(self.tokens)}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Streams that are drawn by weight."""

    streams: tuple[TaskStream, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise InvalidConfig(
                f"A split to train on is listed twice: {', '.join(names)}.",
                remedy="List each split of an environment once, and give it a weight.",
            )

    def draws(self, start: int, count: int) -> list[int]:
        """Return the index of the stream for each position of [start, start + count)."""
        weights = [stream.weight for stream in self.streams]
        numbers = range(len(weights))
        return [
            random.Random(f"{self.seed}:{position}").choices(numbers, weights)[0]
            for position in range(start, start + count)
        ]
