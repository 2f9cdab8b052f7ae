"""Which task comes next, for resets that name none.

    primer = DataLoadingPrimer(tasks, shuffle_seed=7, repeats=4)
    environment = ChatEnv(name="maths", transforms=(primer, ...))

Every reset without a task then takes the next one: each `repeats` times in a row, under one group
id, through epoch after epoch. A run of the trainer does not use this: there replay's task ledger
owns the position and resets name their task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import TaskRef, TaskSource
from dialoop.environments.transform import Transform
from dialoop.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """Where a source stands: tasks taken in this epoch, copies taken of the next task."""

    epoch: int = 0
    index: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One task to play; copies of one task share the group id, which no question's text decides."""

    task: TaskData
    seed: int
    epoch: int
    group_id: str
    repeat: int

    @property
    def info(self) -> dict[str, str]:
        """What the caller is told with the opening."""
        return {
            "task_key": self.task.key,
            "group_id": self.group_id,
            "epoch": str(self.epoch),
            "repeat": str(self.repeat),
        }


class DataSource:
    """An endless run over a split from a cursor that can be kept and set again."""

    def __init__(
        self, tasks: TaskSource, *, split: str = "", shuffle_seed: int = 0, repeats: int = 1
    ) -> None:
        if repeats < 1:
            raise InvalidConfig(f"repeats is {repeats}.", remedy="Give at least 1.")
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
        """The task at the cursor, which moves on."""
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
        """Without end."""
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
    """Loads the next task for each reset that names none; exactly one of tasks and factory.

    With `group_repeats`, `batch(n)` gives n tasks with all their copies (n * repeats items);
    without, it gives n items.
    """

    def __init__(
        self,
        tasks: TaskSource | None = None,
        *,
        factory: Callable[[], TaskSource] | None = None,
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
        found = tasks if tasks is not None else factory() if factory is not None else None
        if not isinstance(found, TaskSource):
            raise InvalidConfig(
                f"A {type(found).__name__} is no source of tasks.",
                remedy="Give a TaskSource, as RowTasks(rows) or JsonlTasks(path).",
            )
        self.tasks: TaskSource = found
        self._repeats = repeats
        self._group_repeats = group_repeats
        self.source = DataSource(found, split=split, shuffle_seed=shuffle_seed, repeats=repeats)

    def next(self) -> Loaded:
        """The next task to play."""
        return self.source.take()

    def batch(self, size: int) -> tuple[Loaded, ...]:
        """The next tasks to play; see the class for what `size` counts."""
        count = size * self._repeats if self._group_repeats else size
        return tuple(self.source.take() for _ in range(count))

    def reset_dataloader(self, cursor: DataCursor | None = None) -> None:
        """Begin again, or go on from a cursor that was kept."""
        self.source.cursor = cursor or DataCursor()
