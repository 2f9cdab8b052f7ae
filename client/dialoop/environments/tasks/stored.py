r"""Tasks from rows that stay on disk, such as problems in GSM8K's form, one JSON object a line.

{"question": "Tom has 3 apples and buys 4. How many?", "answer": "3+4=7\n#### 7"}

JsonlTasks("gsm8k.jsonl").get("train", "1").answer    # "#### 2"

Memory holds about 20 bytes a row: where it begins, its number, and a hash of its key.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dialoop.environments.episode import TaskData
from dialoop.environments.rewards.functions import truth_of
from dialoop.environments.tasks.files import (
    Row,
    StoredRows,
    require_columns,
    rows_of,
    splits_of,
    text_of,
    wrong_value,
)
from dialoop.environments.tasks.source import TaskSource, hash_of, require_share, task_not_found
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason

ReadRow = Callable[[Row, str], TaskData]
"""Makes a task of a row and the row's number; raises InvalidInput (BAD_ROW) that names a column."""

_OWN = ("question", "answer", "id")


class StoredTasks(TaskSource):
    """Rows on disk as split "train", and as "heldout" other rows or a share of these.

    A task's key is its row's number, counted from 0. A hash of the key decides which rows are in
    the share `heldout_fraction`. A task is read when it is asked for; do not change rows in place:
    `get` would return what stands there now. With `checks` every row is read at once, a row without
    an `id` has the number of its line as its key, and one with an id has that.
    """

    def __init__(
        self,
        train: StoredRows,
        read: ReadRow,
        *,
        heldout: StoredRows | None = None,
        heldout_fraction: float = 0.0,
        checks: bool = False,
    ) -> None:
        require_share(heldout_fraction, None if heldout is None else "named too")
        rows = _IndexedRows(train, read, checks=checks)
        self._splits = {"train": _Keys(rows, np.ones(len(train), np.bool_))}
        is_heldout = rows.hashes / 2.0**64 < heldout_fraction
        if heldout is not None:
            others = _IndexedRows(heldout, read, checks=checks)
            self._splits["heldout"] = _Keys(others, np.ones(len(heldout), np.bool_))
        elif is_heldout.any():
            self._splits = {"train": _Keys(rows, ~is_heldout), "heldout": _Keys(rows, is_heldout)}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return ("train",) or ("train", "heldout")."""
        return tuple(self._splits)

    def keys(self, split: str) -> Sequence[str]:
        """Return the keys in the order of the rows; they are made as they are asked for."""
        return self._splits[self.require_split(split)]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a row; InvalidConfig (BAD_ROW) where it is none."""
        split = self.require_split(split)
        keys = self._splits[split]
        index = keys.find(key)
        if index is None:
            raise task_not_found(split, key)
        return keys.rows.task(index)

    def require_rows(self) -> None:
        """Read every row once; raise InvalidConfig (BAD_ROW) for the first that is malformed."""
        for rows in {id(keys.rows): keys.rows for keys in self._splits.values()}.values():
            deque(rows.tasks(), maxlen=0)


class JsonlTasks(StoredTasks):
    """The lines of a file as split "train"; "heldout" is another file, or a share of the lines.

    Each line is a JSON object with the columns `question` (what the policy reads) and `answer` (the
    truth, or a text that ends in `#### truth`). The column `id` is optional: it is the task's key,
    which else is the line number. Other columns become metadata, which the policy never sees; they
    are refused (UNKNOWN_COLUMN) without `metadata`, for an environment that reads none. Those of
    `ignore_columns` are left out. A hash of the key decides which lines are in the share
    `heldout_fraction`. The file may be Parquet, or a folder of `datasets.save_to_disk`.

    Every line is checked at once. The file that was opened is read even if its name leads to
    another one by then. A copy or a pickle opens the file again by its name.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        heldout_path: str | Path | None = None,
        heldout_fraction: float = 0.0,
        metadata: bool = True,
        ignore_columns: Iterable[str] = (),
    ) -> None:
        require_share(heldout_fraction, heldout_path)

        def rows(path: str | Path, split: str) -> StoredRows:
            rows = rows_of(path, split=split, ignore_columns=ignore_columns)
            known = rows.columns if metadata else ("id",)
            require_columns(rows, needed=("question", "answer"), known=known)
            if not len(rows):
                raise InvalidConfig(
                    f"The task file {path} has no tasks.",
                    reason=Reason.TASK_FILE_EMPTY,
                    remedy='Write lines as {"question": "...", "answer": "... #### 7"}.',
                )
            return rows

        train = rows(path, "train")
        if not heldout_path and not heldout_fraction and Path(path).is_dir():
            heldout_path = path if "test" in splits_of(Path(path)) else None
        heldout = rows(heldout_path, "test") if heldout_path else None
        super().__init__(
            train, _problem, heldout=heldout, heldout_fraction=heldout_fraction, checks=True
        )


def _problem(row: Row, number: str) -> TaskData:
    question, answer = text_of(row, "question"), text_of(row, "answer")
    # An answer that ends so holds a truth; to normalise each one would take longer.
    if not (answer[-1:].isalnum() or truth_of(answer)):
        raise wrong_value("answer", row["answer"], 'the truth, perhaps after "#### "')
    return TaskData(
        key=number if row.get("id") is None else text_of(row, "id"),
        question=question,
        answer=answer,
        metadata={
            name: value if isinstance(value, str) else json.dumps(value, default=str)
            for name, value in row.items()
            if name not in _OWN
        },
    )


class _IndexedRows:
    """Rows of tasks, found by the hashes of their keys."""

    def __init__(self, rows: StoredRows, read: ReadRow, *, checks: bool) -> None:
        self._rows, self._read, self._checks = rows, read, checks
        self._has_ids = checks and "id" in rows.columns
        keys = (task.key for task in self.tasks()) if checks else map(str, range(len(rows)))
        hashes = array("Q", map(hash_of, keys))
        self.hashes: NDArray[np.uint64] = np.frombuffer(hashes or b"", dtype=np.uint64)
        self._by_hash = np.argsort(self.hashes, kind="stable").astype(np.uint32)
        self._require_different_keys()

    def key(self, index: int) -> str:
        """Return the key of a row, which is read for it if rows have their own."""
        return self.task(index).key if self._has_ids else self._number(index)

    def _number(self, index: int) -> str:
        return str(self._rows.number(index) if self._checks else index)

    def task(self, index: int) -> TaskData:
        """Read a task; InvalidConfig (BAD_ROW) where it is none."""
        return self._task(index, self._rows[index])

    def _task(self, index: int, row: Row) -> TaskData:
        try:
            return self._read(row, self._number(index))
        except DialoopError as error:
            raise InvalidConfig(
                f"{self._rows.place(index)}: {error.message}",
                reason=Reason.BAD_ROW,
                remedy=error.remedy,
            ) from error

    def tasks(self) -> Iterator[TaskData]:
        """Read every row; InvalidConfig (TASK_FILE_EMPTY, BAD_ROW) where there is no task."""
        if not len(self._rows):
            raise InvalidConfig(
                "The data set has no tasks.",
                reason=Reason.TASK_FILE_EMPTY,
                remedy="Name a file or a split that has some rows.",
            )
        for index, row in enumerate(self._rows):
            yield self._task(index, row)

    def find(self, key: str) -> int | None:
        """Return the index of the row with a key, or None."""
        wanted = np.uint64(hash_of(key))
        place = int(np.searchsorted(self.hashes, wanted, sorter=self._by_hash))
        # Two keys may have the same hash.
        while place < len(self._rows) and self.hashes[self._by_hash[place]] == wanted:
            index = int(self._by_hash[place])
            if self.key(index) == key:
                return index
            place += 1
        return None

    def _require_different_keys(self) -> None:
        ordered = self.hashes[self._by_hash]
        for place in np.flatnonzero(ordered[1:] == ordered[:-1]):
            index = int(self._by_hash[place + 1])
            key = self.key(index)
            first = self.find(key)
            if first is not None and first != index:
                raise InvalidConfig(
                    f"{self._rows.place(index)}: column 'id' is '{key}', which is the key of "
                    f"{self._rows.place(first)} too.",
                    reason=Reason.BAD_ROW,
                    remedy="Give each row an id of its own, or none.",
                )


class _Keys(Sequence[str]):
    """The keys of some rows."""

    def __init__(self, rows: _IndexedRows, is_own: NDArray[np.bool_]) -> None:
        self.rows = rows
        self._indices = np.flatnonzero(is_own).astype(np.uint32)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(map(self.rows.key, map(int, self._indices[index])))
        return self.rows.key(int(self._indices[index]))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def find(self, key: str) -> int | None:
        """Return the index of the row with a key, or None where it is not one of these."""
        index = self.rows.find(key)
        if index is None:
            return None
        place = int(np.searchsorted(self._indices, index))
        return index if place < len(self) and self._indices[place] == index else None
