"""Tasks from rows in memory, such as those of a dataset.

RowTasks([{"query": "What is 3+4?", "answer": "7"}]).get("train", "0").answer    # "7"
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import ListedTasks, TaskSource
from dialoop.errors import DialoopError, InvalidConfig
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


class RowTasks(ListedTasks):
    """Rows with a `query` (after `collate`), perhaps an `answer` and a `key`; the rest is metadata.

    A mapping makes several splits, a list the split "train". Keys are row numbers by default.
    places: where the rows of a split stand, for errors; by default "Row 3 of train".
    """

    def __init__(
        self,
        rows: Rows | Mapping[str, Rows],
        *,
        collate: Collate = text_to_query,
        places: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        splits = rows if isinstance(rows, Mapping) else {"train": rows}
        self._tasks = {
            split: _tasks(split, its_rows, collate, places.get(split))
            for split, its_rows in splits.items()
        }
        super().__init__({split: tuple(tasks) for split, tasks in self._tasks.items()})

    def task(self, split: str, key: str) -> TaskData:
        """Return the task of a row."""
        return self._tasks[split][key]


def tasks_of(data: TaskSource | Rows | Mapping[str, Rows]) -> TaskSource:
    """Return a source of tasks: itself, or one of rows, or of the batches of a torch DataLoader.

    A batch is a dict of lists, one value for each row. Raise InvalidConfig for data without an end,
    or without rows.
    """
    if isinstance(data, TaskSource):
        return data
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InvalidConfig(
            f"A {type(data).__name__} is not a source of tasks.",
            reason=Reason.WRONG_TYPE,
            remedy="Give a TaskSource, rows, or a DataLoader of rows.",
        )
    if not hasattr(data, "__len__"):
        raise InvalidConfig(
            f"A {type(data).__name__} has no length, so it may have no end.",
            reason=Reason.WRONG_TYPE,
            remedy="Give a list of its rows, or a DataLoader of a map-style dataset.",
        )
    if isinstance(data, Mapping):
        return RowTasks({split: _split_batches(rows) for split, rows in data.items()})
    return RowTasks(_split_batches(data))


def _split_batches(rows: Rows) -> list[Any]:
    """Return the rows of batches; what is no batch stays as it is."""
    unbatched: list[Any] = []
    for item in rows:
        columns = list(item.values()) if isinstance(item, Mapping) else []
        lengths = {len(c) if isinstance(c, (list, tuple)) else -1 for c in columns}
        if lengths and -1 not in lengths and len(lengths) == 1:
            names = list(item)
            unbatched += [
                dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)
            ]
        elif isinstance(item, (list, tuple)):  # a collate_fn that keeps a list of rows
            unbatched += item
        else:
            unbatched.append(item)
    return unbatched


def _tasks(
    split: str, rows: Rows, collate: Collate, places: Sequence[str] | None
) -> dict[str, TaskData]:
    tasks: dict[str, TaskData] = {}
    for number, row in enumerate(rows):
        place = places[number] if places else f"Row {number} of {split}"
        if not isinstance(row, Mapping):
            raise InvalidConfig(
                f"{place} is a {type(row).__name__}, not a mapping.",
                reason=Reason.BAD_ROW,
                remedy='Give rows as {"query": "...", "answer": "..."}.',
            )
        try:
            fields = dict(call_now(collate, row))
        except DialoopError as error:
            raise InvalidConfig(
                f"{place}: {error.message}", reason=error.reason, remedy=error.remedy
            ) from error
        query = fields.pop("query", None)
        if not isinstance(query, str) or not query:
            columns = ", ".join(map(str, row))[:200]
            raise InvalidConfig(
                f"{place} has no query. It has: {columns}.",
                reason=Reason.BAD_ROW,
                remedy="Name the question `query`, or give a `collate` that does.",
            )
        key = fields.pop("key", None)
        key = str(number if key is None else key)
        if key in tasks:
            raise InvalidConfig(
                f"{place} has the key '{key}' of an earlier row.",
                reason=Reason.BAD_ROW,
                remedy="Make keys unique.",
            )
        answer = fields.pop("answer", None)
        answer = "" if answer is None else _as_text(answer)
        metadata = {k: _as_text(v) for k, v in fields.items()}
        tasks[key] = TaskData(key=key, question=query, answer=answer, metadata=metadata)
    return tasks


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
