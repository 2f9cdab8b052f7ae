"""Demonstrations for the SFT warm start, rendered by the same path as rollouts."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from dialoop.chat import History
from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dialoop.sequences import Sequence
    from dialoop.token_builder import TokenBuilder

    from services.trainer.settings import TrainerSettings

    Demonstrator = Callable[[random.Random], History]


def demonstration_batches(
    demonstrate: Demonstrator,
    builder: TokenBuilder,
    *,
    stop: tuple[str, ...],
    batch_size: int,
    seed: int,
) -> Iterator[list[Sequence]]:
    """Endless batches of demonstrations as token rows; the same seed gives the same batches."""
    generator = random.Random(seed)
    while True:
        histories = (demonstrate(generator) for _ in range(batch_size))
        yield [builder.demonstration(history, stop=stop) for history in histories]


def demonstrator(settings: TrainerSettings) -> tuple[Demonstrator, tuple[str, ...]]:
    """What shows the way, and the strings that end a message in that environment."""
    use = settings.environment_use or settings.environment
    environment = load_environment(use, settings.environment_options)
    if settings.warm_start_file is not None:
        return demonstrations_from_file(settings.warm_start_file), environment.traits.stop
    if not isinstance(environment, ChatEnv) or environment.demonstrate is None:
        raise InvalidConfig(
            f"The environment {environment.name} demonstrates nothing.",
            reason="NO_DEMONSTRATIONS",
            remedy="Name a warm_start_file, or set warm_start_steps to 0.",
        )
    tasks, split = environment.tasks, settings.warm_start_split
    keys = tasks.keys(split)

    def demonstrate(generator: random.Random) -> History:
        return environment.demonstration(tasks.get(split, generator.choice(keys)), generator)

    return demonstrate, environment.traits.stop


def demonstrations_from_file(path: Path) -> Demonstrator:
    """A demonstrator that draws from a JSONL file of {"messages": [...]} lines."""
    histories: list[History] = []
    try:
        # By newlines alone: JSON strings may hold every other line separator there is.
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise InvalidConfig(
            f"Cannot read the demonstrations {path}: {error.strerror}.",
            remedy="Name a readable JSONL file in warm_start_file.",
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            histories.append(_history(path, number, line))
    if not histories:
        raise InvalidConfig(f"{path} holds no demonstration.", remedy="Add one per line.")
    return lambda generator: generator.choice(histories)


def _history(path: Path, number: int, line: str) -> History:
    try:
        history: History = History.from_chats(json.loads(line)["messages"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{path} line {number} is not a demonstration ({type(error).__name__}).",
            remedy='Write one {"messages": [{"role": ..., "content": ...}, ...]} per line.',
        ) from error
    if not any(message.role == "assistant" for message in history):
        raise InvalidConfig(
            f"{path} line {number} has no assistant message.", remedy="Show what to say."
        )
    return history
