"""Demonstrations, rendered by the same code as rollouts: batches of a warm start, epochs of SFT.

They come from a file, of which only lines that fit the trainer's rows count, or from the
environment's own `demonstrate` on its training tasks. Every batch is a function of the seed and the
number of batches before it, so a restarted trainer continues where it was.

fitting_demonstrations("chats.jsonl", render, settings)
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dialoop.chat import History
from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.environments.environment import Environment
    from dialoop.sequences import Sequence
    from dialoop.tokens.builder import TokenBuilder

    from dialoop_services.trainer.settings import TrainerSettings

    Show = Callable[[int, random.Random], "Demonstration"]
    Render = Callable[["Demonstration"], tuple[Sequence, ...]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to learn from.

    tools: what the template is given as tools. untaught: indices of the assistant's messages that
    are context (weight 0). line: in its file, from 1; 0 where it has none.
    """

    history: History
    tools: tuple[Mapping[str, Any], ...] = ()
    untaught: frozenset[int] = frozenset()
    line: int = 0


class WarmStartBatches:
    """Endless batches of demonstrations as token rows. The same seed gives the same batches."""

    def __init__(
        self, *, size: int, show: Show, render: Render, batch_size: int, seed: int
    ) -> None:
        self._size = size
        self._show = show
        self._render = render
        self._batch_size = batch_size
        self._random = random.Random(seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sequence]:
        return list(chain.from_iterable(map(self._render, self._draw())))

    def skip(self, num_batches: int) -> None:
        """Skip batches that an earlier process has trained, without rendering them."""
        for _ in range(num_batches):
            self._draw()

    def _draw(self) -> list[Demonstration]:
        generator = self._random
        return [
            self._show(generator.randrange(self._size), generator) for _ in range(self._batch_size)
        ]


def warm_start_batches(settings: TrainerSettings, builder: TokenBuilder) -> WarmStartBatches:
    """Return a warm start's batches, from the file that the settings name or the environment."""
    environment, render = _environment(settings, builder)
    if settings.warm_start.file:
        size, show = _held(fitting_demonstrations(settings.warm_start.file, render, settings))
    else:
        remedy = "Name a file in [warm_start], or set its num_steps to 0."
        size, show = _shown(settings, environment, remedy=remedy)
    return WarmStartBatches(
        size=size,
        show=show,
        render=render,
        batch_size=settings.warm_start.batch_size,
        seed=settings.seed,
    )


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
        shown = (self.show(each, random.Random(f"{self.seed}/{epoch}/{each}")) for each in batch)
        return list(chain.from_iterable(map(self.render, shown)))


def demonstration_set(settings: TrainerSettings, builder: TokenBuilder) -> DemonstrationSet:
    """Return the set that the settings name: a file, or the environment's own demonstrations.

    Raises InvalidConfig, which names the line of a file that is too long for the trainer's rows.
    """
    environment, render = _environment(settings, builder)
    heldout: list[Demonstration] = []
    if settings.sft.file:
        train, heldout = _split(settings, render)
        size, show = _held(train)
    else:
        size, show = _shown(settings, environment, remedy="Name a file in [sft].")
    return DemonstrationSet(
        size=size,
        show=show,
        render=render,
        batch_size=settings.sft.batch_size,
        seed=settings.seed,
        heldout=tuple(chain.from_iterable(map(render, heldout))),
    )


def _environment(settings: TrainerSettings, builder: TokenBuilder) -> tuple[Environment, Render]:
    """Return the environment, and the function that renders demonstrations of its tasks."""
    section = settings.environment
    environment = load_environment(
        section.kind, section.arguments, tools_in_prompt=section.tools_in_prompt
    )
    traits = environment.traits

    def render(shown: Demonstration) -> tuple[Sequence, ...]:
        tools = shown.tools or traits.prompt_tools
        options = {"tools": tools} if tools else {}
        return builder.demonstrations(
            shown.history, stop=traits.stop, options=options, untaught=shown.untaught
        )

    return environment, render


def _held(demonstrations: list[Demonstration]) -> tuple[int, Show]:
    return len(demonstrations), lambda which, _: demonstrations[which]


def _shown(settings: TrainerSettings, environment: Environment, *, remedy: str) -> tuple[int, Show]:
    """Return how many training tasks the environment has, and how it demonstrates each."""
    if not isinstance(environment, ChatEnv) or environment.demonstrate is None:
        raise InvalidConfig(
            f"The environment {environment.name} has no demonstrations.",
            reason=Reason.NO_DEMONSTRATIONS,
            remedy=remedy,
        )
    tasks, split = environment.tasks, settings.environment.train_split
    keys = tasks.keys(split)

    def show(which: int, generator: random.Random) -> Demonstration:
        history = environment.demonstration(tasks.get(split, keys[which]), generator)
        return Demonstration(history=history)

    return len(keys), show


def _split(
    settings: TrainerSettings, render: Render
) -> tuple[list[Demonstration], list[Demonstration]]:
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


def num_tokens_to_train(sequence: Sequence, settings: TrainerSettings) -> int:
    """Return how many of its tokens a step trains after `oversize`; 0 if it is dropped."""
    most = settings.packed_row_tokens
    if settings.oversize == "drop" and len(sequence.token_ids) > most:
        return 0
    return int(sequence.response_mask()[:most].sum())


def fitting_demonstrations(
    file: str | Path, render: Render, settings: TrainerSettings
) -> list[Demonstration]:
    """Return the demonstrations of a file that have a token to train; warn about the others.

    Raises InvalidConfig, which names the line: SEQUENCE_TOO_LONG for one that is too long where
    `oversize` is "error", and the template's reason for one that it cannot show. It names the file
    if no demonstration of it is left.
    """
    fitting, most = [], settings.packed_row_tokens
    for shown in read_demonstrations(file):
        try:
            sequences = render(shown)
        except DialoopError as error:
            raise InvalidConfig(
                f"{file} line {shown.line} cannot be taught: {error.message}",
                reason=error.reason,
                remedy=error.remedy,
            ) from error
        length = max(len(sequence.token_ids) for sequence in sequences)
        if length > most and settings.oversize == "error":
            raise InvalidConfig(
                f"{file} line {shown.line} has {length} tokens, more than the {most} of a row.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_row_tokens in [train], shorten it, or set oversize.",
            )
        if any(num_tokens_to_train(sequence, settings) for sequence in sequences):
            fitting.append(shown)
            continue
        log.warning(
            "A demonstration is dropped: it has no token to train in rows of %d tokens: "
            "%s line %d, %d tokens.",
            *(most, file, shown.line, length),
        )
    if not fitting:
        raise InvalidConfig(
            f"No demonstration of {file} has a token to train in rows of {most} tokens.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the demonstrations.",
        )
    return fitting


def numbered_demonstrations(path: Path | str) -> list[tuple[int, History]]:
    """Return the conversations of a file of demonstrations, with the numbers of their lines."""
    return [(shown.line, shown.history) for shown in read_demonstrations(path)]


def read_demonstrations(path: Path | str) -> list[Demonstration]:
    """Return all demonstrations of a JSONL file of {"messages": [...], "tools": [...]} lines.

    A message of the assistant with "weight": 0 is context, as in OpenAI's files. Raises
    InvalidConfig, which names the wrong line.
    """
    path = Path(path)
    demonstrations: list[Demonstration] = []
    try:
        # Split at newlines only: JSON strings may hold every other line separator.
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise InvalidConfig(
            f"Cannot read the demonstrations {path}: {error.strerror}.",
            remedy="Name a readable JSONL file of demonstrations.",
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            demonstrations.append(_demonstration(path, number, line))
    if not demonstrations:
        raise InvalidConfig(f"{path} holds no demonstration.", remedy="Add one per line.")
    return demonstrations


def _demonstration(path: Path, number: int, line: str) -> Demonstration:
    where = f"{path} line {number}"
    try:
        row = json.loads(line)
        chats, tools = row["messages"], row.get("tools") or ()
        weights = {i: c.pop("weight") for i, c in enumerate(chats) if _has_weight(c)}
        history: History = History.from_chats(chats)
    except DialoopError as error:
        raise InvalidConfig(
            f"{where}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidConfig(
            f"{where} is not a demonstration ({type(error).__name__}).",
            remedy='Write one {"messages": [{"role": ..., "content": ...}, ...]} per line.',
        ) from error
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise InvalidConfig(
            f"{where}: tools is no list of tools.",
            reason=Reason.TOOL_INVALID,
            remedy='Write "tools": [{"type": "function", "function": {...}}, ...].',
        )
    untaught = _untaught(history, weights, where)
    if all(m.role != "assistant" or i in untaught for i, m in enumerate(history)):
        raise InvalidConfig(
            f"{where} has no assistant message to learn from.",
            remedy="Add one, whose weight is not 0.",
        )
    return Demonstration(history=history, tools=tuple(tools), untaught=untaught, line=number)


def _has_weight(chat: Any) -> bool:
    return isinstance(chat, dict) and "weight" in chat


def _untaught(history: History, weights: Mapping[int, Any], where: str) -> frozenset[int]:
    """Return the messages of weight 0; raise for what is no weight of an assistant's message."""
    for index, weight in weights.items():
        is_weight = weight in (0, 1) and not isinstance(weight, bool | str)
        if history[index].role != "assistant" or not is_weight:
            raise InvalidConfig(
                f"{where}: messages[{index}].weight is {weight!r:.20}.",
                remedy="Give assistant messages weight 0 or 1, and others none.",
            )
    return frozenset(index for index, weight in weights.items() if not weight)
