"""Demonstrations, rendered by the same code as rollouts: batches of a warm start, epochs of SFT.

They come from a file, of which only lines that fit the trainer's rows count, or from the
environment's own `demonstrate` on its training tasks. Every batch is a function of the seed and the
number of batches before it, so a restarted trainer continues where it was.

read_demonstrations("chats.jsonl")[0].place    # "line 1 of chats.jsonl"
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dialoop.chat import History
from dialoop.environments import ChatEnv, load_environment
from dialoop.environments.tasks.files import (
    different_keys,
    require_columns,
    rows_of,
    wrong_value,
)
from dialoop.errors import DialoopError, InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.tasks.stored_tasks import read_taught
from dialoop.user_functions import TimeIsUp, raised_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.environments.environment import Environment
    from dialoop.environments.tasks.files import Row
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
    are context (weight 0). place: where it stands, as "line 3 of chats.jsonl".
    """

    history: History
    tools: tuple[Mapping[str, Any], ...] = ()
    untaught: frozenset[int] = frozenset()
    place: str = ""


def _has_answer(sequence: Sequence) -> bool:
    return bool(sequence.response_mask().any())


class WarmStartBatches:
    """Endless batches of demonstrations as token rows. The same seed gives the same batches."""

    def __init__(
        self,
        *,
        size: int,
        show: Show,
        render: Render,
        batch_size: int,
        seed: int,
        trains: Callable[[Sequence], bool] = _has_answer,
    ) -> None:
        self._size = size
        self._show = show
        self._render = render
        self._trains = trains
        self._batch_size = batch_size
        self._random = random.Random(seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sequence]:
        others = (self._show(i, random.Random(i)) for i in range(self._size))
        return _trainable(self._draw(), others, self._render, self._trains)

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
        read = read_demonstrations(
            settings.warm_start.file, settings.warm_start.ignore_columns, table="[warm_start]"
        )
        size, show = _held(_fitting(read, settings.warm_start.file, render, settings))
    else:
        remedy = "Name a file in [warm_start], or set its num_steps to 0."
        size, show = _shown(settings, environment, remedy=remedy)
    return WarmStartBatches(
        size=size,
        show=show,
        render=render,
        batch_size=settings.warm_start.batch_size,
        seed=settings.seed,
        trains=lambda sequence: num_tokens_to_train(sequence, settings) > 0,
    )


def _trainable(
    batch: Iterable[Demonstration],
    others: Iterable[Demonstration],
    render: Render,
    trains: Callable[[Sequence], bool],
) -> list[Sequence]:
    """Return a batch's sequences; with those of others where none has a token to train.

    Raise InvalidConfig (SEQUENCE_TOO_LONG) where none of the others has one either.
    """
    sequences, more = list(chain.from_iterable(map(render, batch))), iter(others)
    while not any(map(trains, sequences)):
        shown = next(more, None)
        if shown is None:
            shortest = min(len(sequence.token_ids) for sequence in sequences)
            raise InvalidConfig(
                f"No demonstration has a token to train in a row: the shortest has {shortest} "
                "tokens.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_row_tokens in [train], or shorten the demonstrations.",
            )
        sequences += render(shown)
    return sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """A set of `size` demonstrations, rendered when a batch needs them; `heldout` never train.

    trains: whether a sequence has a token to train in the trainer's rows.
    """

    size: int
    show: Show
    render: Render
    batch_size: int
    seed: int
    heldout: tuple[Sequence, ...] = ()
    trains: Callable[[Sequence], bool] = _has_answer

    @property
    def steps_per_epoch(self) -> int:
        """Return how many batches an epoch has; the last one may be smaller."""
        return -(-self.size // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of a train step, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[Sequence]:
        """Return the rendered demonstrations of a train step, one at least of which it trains."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = list(range(self.size))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        begin, end = index * self.batch_size, (index + 1) * self.batch_size
        batch, others = (
            (self.show(each, random.Random(f"{self.seed}/{epoch}/{each}")) for each in part)
            for part in (order[begin:end], order[end:] + order[:begin])
        )
        return _trainable(batch, others, self.render, self.trains)


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
        trains=lambda sequence: num_tokens_to_train(sequence, settings) > 0,
        seed=settings.seed,
        heldout=tuple(chain.from_iterable(map(render, heldout))),
    )


def _environment(settings: TrainerSettings, builder: TokenBuilder) -> tuple[Environment, Render]:
    """Return the environment, and the function that renders a demonstration.

    It raises InvalidConfig, which names the demonstration: SEQUENCE_TOO_LONG for one that is too
    long where `oversize` is "error", and the template's reason for one that it cannot show.
    """
    section = settings.environment
    environment = load_environment(
        section.kind, section.arguments, tools_in_prompt=section.tools_in_prompt
    )
    traits = environment.traits

    most = settings.packed_row_tokens

    def render(shown: Demonstration) -> tuple[Sequence, ...]:
        tools = shown.tools or traits.prompt_tools
        options = {"tools": tools} if tools else {}
        try:
            sequences = builder.demonstrations(
                shown.history, stop=traits.stop, options=options, untaught=shown.untaught
            )
        except DialoopError as error:
            raise InvalidConfig(
                f"{shown.place} cannot be taught: {error.message}",
                reason=error.reason,
                remedy=error.remedy,
            ) from error
        length = max(len(sequence.token_ids) for sequence in sequences)
        if length > most and settings.oversize == "error":
            raise InvalidConfig(
                f"{shown.place} has {length} tokens, more than the {most} of a row.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_row_tokens in [train], shorten it, or set oversize.",
            )
        return sequences

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
        place = f"The demonstration of task {keys[which]} of {environment.name}"
        try:
            history = environment.demonstration(tasks.get(split, keys[which]), generator)
        except Exception as error:
            why = str(error) if isinstance(error, DialoopError | TimeIsUp) else raised_at(error)
            raise InvalidConfig(
                f"{place} cannot be made: {why}.",
                reason=Reason.NO_DEMONSTRATIONS,
                remedy="Correct `demonstrate` of the environment.",
            ) from error
        return Demonstration(history=history, place=place)

    return len(keys), show


def _split(
    settings: TrainerSettings, render: Render
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Return the demonstrations to train and those to hold out, from one file or two."""
    sft = settings.sft

    def fitting(file: str, split: str) -> list[Demonstration]:
        read = read_demonstrations(file, sft.ignore_columns, split=split)
        return _fitting(read, file, render, settings)

    histories = fitting(sft.file, "train")
    if sft.heldout_file:
        return histories, fitting(sft.heldout_file, "test")
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


def _fitting(
    demonstrations: Iterable[Demonstration], file: str, render: Render, settings: TrainerSettings
) -> list[Demonstration]:
    """Return the demonstrations of a file that have a token to train; warn about the others.

    Raises InvalidConfig as `render` does, and where no demonstration of it is left.
    """
    fitting, most = [], settings.packed_row_tokens
    for shown in demonstrations:
        sequences = render(shown)
        if any(num_tokens_to_train(sequence, settings) for sequence in sequences):
            fitting.append(shown)
            continue
        log.warning(
            "A demonstration is dropped: it has no token to train in rows of %d tokens: "
            "%s, %d tokens.",
            *(most, shown.place, max(len(sequence.token_ids) for sequence in sequences)),
        )
    if not fitting:
        raise InvalidConfig(
            f"No demonstration of {file} has a token to train in rows of {most} tokens.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the demonstrations.",
        )
    return fitting


def read_demonstrations(
    path: Path | str,
    ignore_columns: Iterable[str] = (),
    *,
    table: str = "[sft]",
    split: str = "train",
) -> list[Demonstration]:
    """Return all demonstrations of a file of {"messages": [...], "tools": [...]} rows.

    It is JSON lines, Parquet or a saved data set's `split`. A message of the assistant with
    "weight": 0 is context, as in OpenAI's files. Raises InvalidConfig, which names row, field and
    cause (BAD_ROW), or columns that nothing reads (UNKNOWN_COLUMN); `table` is that of the config.
    """
    rows = rows_of(path, split=split, ignore_columns=ignore_columns)
    if not len(rows):
        raise InvalidConfig(f"{path} holds no demonstration.", remedy="Add one per line.")
    require_columns(rows, needed=("messages",), known=("tools",), table=table)
    demonstrations = []
    for index, row in enumerate(rows):
        filled = _without_gaps(row) if rows.has_all_fields else row
        demonstrations.append(_demonstration(rows.place(index), filled))
    return demonstrations


def _demonstration(place: str, row: Row) -> Demonstration:
    try:
        history, untaught = read_taught(row, "messages")
        tools = _tools(row.get("tools"))
        if all(m.role != "assistant" or i in untaught for i, m in enumerate(history)):
            raise InvalidInput(
                "messages have none of the assistant to learn from.",
                reason=Reason.BAD_ROW,
                remedy="Add one, whose weight is not 0.",
            )
    except DialoopError as error:
        raise InvalidConfig(
            f"{place}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error
    return Demonstration(history=history, tools=tools, untaught=untaught, place=place)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return a row's tools; Parquet files have them as JSON text, too."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value, object_pairs_hook=different_keys)
    value = () if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(t, Mapping) for t in value):
        raise wrong_value("tools", value, '[{"type": "function", "function": {...}}, ...]')
    return tuple(value)


def _without_gaps(value: Any) -> Any:
    """Return a value without the null fields that a struct has for those of other rows."""
    if isinstance(value, Mapping):
        return {name: _without_gaps(v) for name, v in value.items() if v is not None}
    return [_without_gaps(v) for v in value] if isinstance(value, list) else value
