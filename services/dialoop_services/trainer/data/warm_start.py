"""Demonstrations for the SFT warm start, rendered by the same code as rollouts."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_services.trainer.data.demonstration_files import fitting_demonstrations

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from dialoop.chat import History
    from dialoop.sequences import Sequence
    from dialoop.tokens.builder import TokenBuilder

    from dialoop_services.trainer.settings import TrainerSettings

    Demonstrator = Callable[[random.Random], History]


class WarmStartBatches:
    """Endless batches of demonstrations as token rows. The same seed gives the same batches."""

    def __init__(
        self,
        demonstrate: Demonstrator,
        builder: TokenBuilder,
        *,
        stop: tuple[str, ...],
        batch_size: int,
        seed: int,
    ) -> None:
        self._demonstrate = demonstrate
        self._builder = builder
        self._stop = stop
        self._batch_size = batch_size
        self._random = random.Random(seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sequence]:
        return [self._builder.demonstration(history, stop=self._stop) for history in self._draw()]

    def skip(self, num_batches: int) -> None:
        """Skip batches that an earlier process has trained, without rendering them."""
        for _ in range(num_batches):
            self._draw()

    def _draw(self) -> list[History]:
        return [self._demonstrate(self._random) for _ in range(self._batch_size)]


def demonstrator(
    settings: TrainerSettings, builder: TokenBuilder
) -> tuple[Demonstrator, tuple[str, ...]]:
    """Return a function that draws a demonstration, and the strings that end a message."""
    section = settings.environment
    environment = load_environment(section.kind, section.arguments)
    if settings.warm_start.file:
        render = partial(builder.demonstration, stop=environment.traits.stop)
        histories = fitting_demonstrations(Path(settings.warm_start.file), render, settings)
        return lambda generator: generator.choice(histories), environment.traits.stop
    if not isinstance(environment, ChatEnv) or environment.demonstrate is None:
        raise no_demonstrations(
            environment.name, remedy="Name a file in [warm_start], or set its num_steps to 0."
        )
    tasks, split = environment.tasks, settings.environment.train_split
    keys = tasks.keys(split)

    def demonstrate(generator: random.Random) -> History:
        return environment.demonstration(tasks.get(split, generator.choice(keys)), generator)

    return demonstrate, environment.traits.stop


def no_demonstrations(environment: str, *, remedy: str) -> InvalidConfig:
    """Return the error for an environment that has no demonstrations."""
    return InvalidConfig(
        f"The environment {environment} has no demonstrations.",
        reason=Reason.NO_DEMONSTRATIONS,
        remedy=remedy,
    )
