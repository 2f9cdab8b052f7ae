"""The data of SFT: demonstrations in epochs, and held-out ones.

Every batch is a function of the seed and the step, so a restarted trainer continues where it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import InvalidConfig

from dialoop_services.trainer.data.demonstration_files import fitting_demonstrations
from dialoop_services.trainer.data.warm_start import no_demonstrations

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.chat import History
    from dialoop.sequences import Sequence
    from dialoop.tokens.builder import TokenBuilder

    from dialoop_services.trainer.settings import TrainerSettings

    Show = Callable[[int, random.Random], History]
    Render = Callable[[History], Sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """A set of `size` demonstrations, rendered when a batch needs them; `heldout` never train."""

    size: int
    show: Show
    render: Render
    batch_size: int
    seed: int
    heldout: tuple[Sequence, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Return how many batches an epoch has; the last one may be smaller."""
        return -(-self.size // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of a train step, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[Sequence]:
        """Return the rendered demonstrations of a train step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = list(range(self.size))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        batch = order[index * self.batch_size : (index + 1) * self.batch_size]
        return [
            self.render(self.show(which, random.Random(f"{self.seed}/{epoch}/{which}")))
            for which in batch
        ]


def demonstration_set(settings: TrainerSettings, builder: TokenBuilder) -> DemonstrationSet:
    """Return the set that the settings name: a file, or the environment's own demonstrations.

    Raises InvalidConfig, which names the line of a file that is too long for the trainer's rows.
    """
    section = settings.environment
    environment = load_environment(section.kind, section.arguments)
    stop = environment.traits.stop

    def render(history: History) -> Sequence:
        return builder.demonstration(history, stop=stop)

    heldout: list[History] = []
    if settings.sft.file:
        train, heldout = _split(settings, render)

        def show(which: int, generator: random.Random) -> History:
            return train[which]

        size = len(train)
    else:
        if not isinstance(environment, ChatEnv) or environment.demonstrate is None:
            raise no_demonstrations(environment.name, remedy="Name a file in [sft].")
        tasks, split = environment.tasks, settings.environment.train_split
        keys = tasks.keys(split)

        def show(which: int, generator: random.Random) -> History:
            return environment.demonstration(tasks.get(split, keys[which]), generator)

        size = len(keys)
    return DemonstrationSet(
        size=size,
        show=show,
        render=render,
        batch_size=settings.sft.batch_size,
        seed=settings.seed,
        heldout=tuple(map(render, heldout)),
    )


def _split(settings: TrainerSettings, render: Render) -> tuple[list[History], list[History]]:
    """Return the demonstrations to train and those to hold out, from one file or two."""
    histories = fitting_demonstrations(settings.sft.file, render, settings)
    if settings.sft.heldout_file:
        return histories, fitting_demonstrations(settings.sft.heldout_file, render, settings)
    random.Random(settings.seed).shuffle(histories)
    num_heldout = int(len(histories) * settings.sft.heldout_fraction)
    if num_heldout == len(histories):
        raise InvalidConfig(
            f"heldout_fraction holds out every demonstration of {settings.sft.file}.",
            remedy="Add demonstrations, or lower heldout_fraction.",
        )
    return histories[num_heldout:], histories[:num_heldout]
