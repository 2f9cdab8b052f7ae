"""The next task, for resets that name none.

    primer = DataLoadingPrimer(tasks, shuffle_seed=7, repeats=4)
    environment = ChatEnv(name="maths", transforms=(primer, MaxTurns(4)))

Every reset without a task then takes the next one. Each task comes `repeats` times in a row, under
one group id, in epoch after epoch. The trainer does not use this: replay's task ledger holds its
position, and its resets name their task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.row_tasks import tasks_of
from dialoop.environments.tasks.source import TaskRef, TaskSource
from dialoop.environments.transform import Transform
from dialoop.errors import InvalidConfig
from dialoop.user_functions import call_now


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """A source's position: tasks taken in this epoch, and copies taken of the next task."""

    epoch: int = 0
    index: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One task to play. Copies of a task share the group id, which depends on its key alone."""

    task: TaskData
    seed: int
    epoch: int
    group_id: str
    repeat: int

    @property
    def info(self) -> dict[str, str]:
        """Return facts for the caller, to add to the opening."""
        return {
            "task_key": self.task.key,
            "group_id": self.group_id,
            "epoch": str(self.epoch),
            "repeat": str(self.repeat),
        }


class DataSource:
    """An endless walk through a split. You can save its cursor and set it again."""

    def __init__(
        self, tasks: TaskSource, *, split: str = "", shuffle_seed: int = 0, repeats: int = 1
    ) -> None:
        if repeats < 1:
            raise InvalidConfig(f"repeats is {repeats}.", remedy="Use 1 or more.")
        self.tasks = tasks
        self.split = tasks.require_split(split)
        self.cursor = DataCursor()
        self._shuffle_seed = shuffle_seed
        self._repeats = repeats
        if not tasks.num_tasks(self.split):
            raise InvalidConfig(
                f"Split '{self.split}' has no tasks.", remedy="Name a split that has some."
            )

    def take(self) -> Loaded:
        """Return the task at the cursor, and move the cursor on."""
        ref, following = self._at(self.cursor)
        loaded = Loaded(
            task=self.tasks.get(self.split, ref.key),
            seed=ref.seed,
            epoch=ref.epoch,
            group_id=f"{self.split}/{ref.epoch}/{ref.key}",
            repeat=self.cursor.repeat,
        )
        last_copy = self.cursor.repeat + 1 == self._repeats
        now = self.cursor
        self.cursor = (
            following
            if last_copy
            else DataCursor(epoch=now.epoch, index=now.index, repeat=now.repeat + 1)
        )
        return loaded

    def __iter__(self) -> Iterator[Loaded]:
        """Take tasks without end."""
        while True:
            yield self.take()

    def _at(self, cursor: DataCursor) -> tuple[TaskRef, DataCursor]:
        page = self.tasks.page(
            self.split,
            page_token=f"{cursor.epoch}:{cursor.index}",
            page_size=1,
            shuffle_seed=self._shuffle_seed,
        )
        epoch, _, index = page.next_page_token.partition(":")
        return page.tasks[0], DataCursor(epoch=int(epoch), index=int(index))


class DataLoadingPrimer(Transform):
    """The transform that loads the next task for each reset that names none.

    Pass either `tasks` or `factory`, a function that returns them. They are a TaskSource, rows, or
    a torch DataLoader of rows, which is read once.

    With `group_repeats`, `batch(n)` returns n tasks with all their copies (n * repeats items);
    without it, n items.
    """

    def __init__(
        self,
        tasks: TaskSource | Any = None,
        *,
        factory: Callable[[], Any] | None = None,
        split: str = "",
        shuffle_seed: int = 0,
        repeats: int = 1,
        group_repeats: bool = False,
    ) -> None:
        if (tasks is None) == (factory is None):
            raise InvalidConfig(
                "DataLoadingPrimer needs exactly one of tasks and factory.",
                remedy="Give a TaskSource, or a function that makes one.",
            )
        source = tasks_of(call_now(factory) if factory is not None else tasks)
        self.tasks: TaskSource = source
        self._repeats = repeats
        self._group_repeats = group_repeats
        self.source = DataSource(source, split=split, shuffle_seed=shuffle_seed, repeats=repeats)

    def next(self) -> Loaded:
        """Return the next task to play."""
        return self.source.take()

    def batch(self, size: int) -> tuple[Loaded, ...]:
        """Return the next tasks to play; the class says what `size` counts."""
        count = size * self._repeats if self._group_repeats else size
        return tuple(self.source.take() for _ in range(count))

    def reset_dataloader(self, cursor: DataCursor | None = None) -> None:
        """Start again, or continue from a saved cursor."""
        self.source.cursor = cursor or DataCursor()
