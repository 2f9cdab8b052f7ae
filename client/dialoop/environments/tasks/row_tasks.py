"""Tasks from rows in memory, such as those of a dataset, and a chat environment for them.

RowTasks([{"query": "What is 3+4?", "answer": "7"}, ...])
dataset_chat_env(rows, transforms=(EndOnTag(), AnswerTagReward()), max_steps=1)
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.episode import TaskData
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.data_loading import DataLoadingPrimer
from dialoop.environments.tasks.source import TaskSource, task_not_found
from dialoop.environments.transform import Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import call_now

Rows = Iterable[Mapping[str, Any]]
Row = Mapping[str, Any]
Collate = Callable[[Row], Row | Awaitable[Row]]


def text_to_query(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with its `text` or `question` under the name `query`."""
    old = next((name for name in ("text", "question") if name in row), None)
    if "query" in row or old is None:
        return row
    return {"query": row[old], **{k: v for k, v in row.items() if k != old}}


class RowTasks(TaskSource):
    """Rows with a `query` (after `collate`), perhaps an `answer` and a `key`; the rest is metadata.

    A mapping makes several splits, a list the split "train". Keys are row numbers by default.
    """

    def __init__(
        self, rows: Rows | Mapping[str, Rows], *, collate: Collate = text_to_query
    ) -> None:
        splits = rows if isinstance(rows, Mapping) else {"train": rows}
        self._tasks = {
            split: _tasks(split, its_rows, collate) for split, its_rows in splits.items()
        }

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._tasks)

    def keys(self, split: str) -> Sequence[str]:
        """Return the keys in the order of the rows."""
        return tuple(self._tasks[self.require_split(split)])

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a row."""
        split = self.require_split(split)
        if key not in self._tasks[split]:
            raise task_not_found(split, key)
        return self._tasks[split][key]


def dataset_chat_env(  # noqa: PLR0913 - the options are the interface
    dataset: TaskSource | Rows | Mapping[str, Rows],
    *,
    name: str = "dataset",
    split: str = "",
    shuffle: bool = True,
    seed: int | None = None,
    repeats: int = 1,
    group_repeats: bool = False,
    collate: Collate = text_to_query,
    transforms: Sequence[Transform] = (),
    max_steps: int | None = None,
    **options: Any,
) -> ChatEnv:
    """Return a ChatEnv that loads its own questions; a reset without a task takes the next one.

    The split is "train" by default, if there is one. Without `seed` the order is random. `options`
    are those of ChatEnv.
    """
    tasks = dataset if isinstance(dataset, TaskSource) else RowTasks(dataset, collate=collate)
    shuffle_seed = 0 if not shuffle else random.randrange(1, 2**31) if seed is None else seed
    if shuffle and shuffle_seed == 0:
        raise InvalidConfig(
            "seed is 0, which keeps the shuffle_seed of the rows.",
            remedy="Use another seed, or shuffle=False.",
        )
    primer = DataLoadingPrimer(
        tasks, split=split, shuffle_seed=shuffle_seed, repeats=repeats, group_repeats=group_repeats
    )
    limit = () if max_steps is None else (StepCounter(max_steps),)
    return ChatEnv(name=name, transforms=(primer, *transforms, *limit), **options)


def _tasks(split: str, rows: Rows, collate: Collate) -> dict[str, TaskData]:
    tasks: dict[str, TaskData] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidConfig(
                f"Row {number} of {split} is a {type(row).__name__}, not a mapping.",
                reason=Reason.BAD_ROW,
                remedy='Give rows as {"query": "...", "answer": "..."}.',
            )
        fields = dict(call_now(collate, row))
        query = fields.pop("query", None)
        if not isinstance(query, str) or not query:
            columns = ", ".join(map(str, row))[:200]
            raise InvalidConfig(
                f"Row {number} of {split} has no query. It has: {columns}.",
                reason=Reason.BAD_ROW,
                remedy="Name the question `query`, or give a `collate` that does.",
            )
        key = str(fields.pop("key", number))
        if key in tasks:
            raise InvalidConfig(
                f"Two rows of {split} have the key '{key}'.", remedy="Make keys unique."
            )
        answer = _as_text(fields.pop("answer", ""))
        metadata = {k: _as_text(v) for k, v in fields.items()}
        tasks[key] = TaskData(key=key, question=query, answer=answer, metadata=metadata)
    return tasks


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
