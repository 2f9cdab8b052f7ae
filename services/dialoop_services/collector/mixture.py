"""Which environment each training task comes from, where a job trains on several.

mixture = Mixture((Ingredient(environment="a"), Ingredient(environment="b", weight=3.0)), seed=1)
mixture.draws(0, 4)      # [1, 1, 0, 1]: a pure function of the seed and the position
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """A split of an environment, and how often it is drawn beside the others."""

    environment: str
    split: str = "train"
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What a cursor calls it."""
        return f"{self.environment}/{self.split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How many tasks were drawn, and the page token of each ingredient: where a job stands."""

    position: int = 0
    tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, first: Ingredient) -> Cursor:
        """A cursor of a mixture, or the page token of a job that had one environment alone."""
        if not text.startswith("{"):
            return cls(tokens={first.name: text} if text else {})
        found = json.loads(text)
        return cls(position=found["position"], tokens=found["tokens"])

    def __str__(self) -> str:
        return json.dumps({"position": self.position, "tokens": dict(self.tokens)}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Ingredients drawn by weight; one alone is not drawn at all."""

    ingredients: tuple[Ingredient, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        names = [ingredient.name for ingredient in self.ingredients]
        if len(set(names)) != len(names):
            raise InvalidConfig(
                f"Two of the environments to train on are one: {', '.join(names)}.",
                remedy="Name each split of an environment once, and give it a weight.",
            )

    def draws(self, start: int, count: int) -> list[int]:
        """The ingredient of each position [start, start + count)."""
        weights = [ingredient.weight for ingredient in self.ingredients]
        numbers = range(len(weights))
        return [
            random.Random(f"{self.seed}:{position}").choices(numbers, weights)[0]
            for position in range(start, start + count)
        ]
