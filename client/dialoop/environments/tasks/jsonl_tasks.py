r"""Tasks from a file: one JSON object per line with `question` and `answer`, in GSM8K's form.

{"question": "Tom has 3 apples and buys 4. How many?", "answer": "3+4=7\n#### 7"}

The file is checked once and then stays on disk. Memory holds about 20 bytes a line: where the line
begins, its number, and a hash of its key. Parquet and saved data sets are read as well.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
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
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

_OWN = ("question", "answer", "id")


class JsonlTasks(TaskSource):
    """The lines of a file as split "train"; "heldout" is another file, or a share of the lines.

    Each line is a JSON object with the columns `question` (what the policy reads) and `answer` (the
    truth, or a text that ends in `#### truth`). The column `id` is optional: it is the task's key,
    which else is the line number. Other columns become metadata, which the policy never sees; they
    are refused (UNKNOWN_COLUMN) without `metadata`, for an environment that reads none. Those of
    `ignore_columns` are left out. A hash of the key decides which lines are in the share
    `heldout_fraction`. The file may be Parquet, or a folder of `datasets.save_to_disk`.

    A task is read from the file when it is asked for. The file that was opened is read even if its
    name leads to another one by then. Do not change its lines in place: `get` would return what
    stands there now, or raise InvalidConfig where that is no task. A copy or a pickle opens the
    file again by its name.
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

        def read(path: str | Path, split: str) -> _IndexedRows:
            rows = rows_of(path, split=split, ignore_columns=ignore_columns)
            known = rows.columns if metadata else ("id",)
            require_columns(rows, needed=("question", "answer"), known=known)
            return _IndexedRows(Path(path), rows)

        file = read(path, "train")
        self._splits = {"train": _Lines(file, np.arange(file.num_lines, dtype=np.uint32))}
        if not heldout_path and not heldout_fraction and Path(path).is_dir():
            heldout_path = path if "test" in splits_of(Path(path)) else None
        if heldout_path:
            other = read(heldout_path, "test")
            self._splits["heldout"] = _Lines(other, np.arange(other.num_lines, dtype=np.uint32))
        elif heldout_fraction:
            is_heldout = file.hashes / 2.0**64 < heldout_fraction
            if is_heldout.any():
                self._splits = {
                    "train": _Lines(file, np.flatnonzero(~is_heldout).astype(np.uint32)),
                    "heldout": _Lines(file, np.flatnonzero(is_heldout).astype(np.uint32)),
                }

    @property
    def splits(self) -> tuple[str, ...]:
        """Return ("train",) or ("train", "heldout")."""
        return tuple(self._splits)

    def keys(self, split: str) -> Sequence[str]:
        """Return the keys in the order of the file; they are read as they are asked for."""
        return self._splits[self.require_split(split)]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a line."""
        split = self.require_split(split)
        task = self._splits[split].find(key)
        if task is None:
            raise task_not_found(split, key)
        return task


class _IndexedRows:
    """Rows of tasks that have all been checked, found by the hashes of their keys."""

    def __init__(self, path: Path, rows: StoredRows) -> None:
        self._rows = rows
        hashes = array("Q")
        self._has_ids = "id" in rows.columns
        for index, row in enumerate(rows):
            hashes.append(hash_of(self._task(index, row).key))
        if not hashes:
            raise InvalidConfig(
                f"The task file {path} has no tasks.",
                reason=Reason.TASK_FILE_EMPTY,
                remedy='Write lines as {"question": "...", "answer": "... #### 7"}.',
            )
        self.hashes: NDArray[np.uint64] = np.frombuffer(hashes, dtype=np.uint64)
        self._by_hash = np.argsort(self.hashes, kind="stable").astype(np.uint32)
        self._require_different_keys()

    @property
    def num_lines(self) -> int:
        return len(self._rows)

    def key(self, index: int) -> str:
        return self.task(index).key if self._has_ids else str(self._rows.number(index))

    def task(self, index: int) -> TaskData:
        """Read a task; InvalidConfig (BAD_ROW) where it is none."""
        return self._task(index, self._rows[index])

    def _task(self, index: int, row: Row) -> TaskData:
        try:
            question, answer = text_of(row, "question"), text_of(row, "answer")
            # An answer that ends so holds a truth; to normalise each one would take longer.
            if not (answer[-1:].isalnum() or truth_of(answer)):
                raise wrong_value("answer", row["answer"], 'the truth, perhaps after "#### "')
            has_id = row.get("id") is not None
            key = text_of(row, "id") if has_id else str(self._rows.number(index))
        except InvalidInput as error:
            raise InvalidConfig(
                f"{self._rows.place(index)}: {error.message}",
                reason=error.reason,
                remedy=error.remedy,
            ) from error
        rest = {name: value for name, value in row.items() if name not in _OWN}
        return TaskData(
            key=key,
            question=question,
            answer=answer,
            metadata={
                name: value if isinstance(value, str) else json.dumps(value, default=str)
                for name, value in rest.items()
            },
        )

    def find(self, key: str) -> tuple[int, TaskData] | None:
        """Return the task with a key and its index, or None."""
        wanted = np.uint64(hash_of(key))
        place = int(np.searchsorted(self.hashes, wanted, sorter=self._by_hash))
        # Two keys may have the same hash.
        while place < self.num_lines and self.hashes[self._by_hash[place]] == wanted:
            index = int(self._by_hash[place])
            task = self.task(index)
            if task.key == key:
                return index, task
            place += 1
        return None

    def _require_different_keys(self) -> None:
        ordered = self.hashes[self._by_hash]
        for place in np.flatnonzero(ordered[1:] == ordered[:-1]):
            index = int(self._by_hash[place + 1])
            key = self.key(index)
            if (first := self.find(key)) and first[0] != index:
                raise InvalidConfig(
                    f"{self._rows.place(index)}: column 'id' is '{key}', which is the key of "
                    f"{self._rows.place(first[0])} too.",
                    reason=Reason.BAD_ROW,
                    remedy="Give each row an id of its own, or none.",
                )


class _Lines(Sequence[str]):
    """Some lines of a file, as the keys of their tasks."""

    def __init__(self, file: _IndexedRows, indices: NDArray[np.uint32]) -> None:
        self._file = file
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(map(self._file.key, map(int, self._indices[index])))
        return self._file.key(int(self._indices[index]))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def find(self, key: str) -> TaskData | None:
        """Return the task with a key, or None where these lines do not hold it."""
        index_and_task = self._file.find(key)
        if index_and_task is None:
            return None
        index, task = index_and_task
        place = int(np.searchsorted(self._indices, index))
        is_here = place < len(self) and self._indices[place] == index
        return task if is_here else None
