r"""Tasks from a file: one JSON object per line with `question` and `answer`, in GSM8K's form.

{"question": "Tom has 3 apples and buys 4. How many?", "answer": "3+4=7\n#### 7"}

The file is checked once and then stays on disk. Memory holds about 20 bytes a line: where the line
begins, its number, and a hash of its key.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from dialoop.environments.episode import TaskData
from dialoop.environments.rewards.functions import truth_of
from dialoop.environments.tasks.source import TaskSource, hash_of, require_share, task_not_found
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason


class JsonlTasks(TaskSource):
    """The lines of a file as split "train"; "heldout" is another file, or a share of the lines.

    Each line is a JSON object with the columns `question` (what the policy reads) and `answer` (the
    truth, or a text that ends in `#### truth`). The column `id` is optional: it is the task's key,
    which else is the line number. Other columns become metadata, which the policy never sees. A
    hash of the key decides which lines are in the share `heldout_fraction`.

    A task is read from the file when it is asked for. The file that was opened is read even if its
    name leads to another one by then. Do not change its lines in place: `get` would return what
    stands there now, or raise InvalidConfig (TASK_FILE_BROKEN) where that is no task. A copy or a
    pickle opens the file again by its name.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        heldout_path: str | Path | None = None,
        heldout_fraction: float = 0.0,
    ) -> None:
        require_share(heldout_fraction, heldout_path)
        file = _IndexedFile(Path(path))
        self._splits = {"train": _Lines(file, np.arange(file.num_lines, dtype=np.uint32))}
        if heldout_path:
            other = _IndexedFile(Path(heldout_path))
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


class _IndexedFile:
    """A file of tasks whose lines have all been checked, read line by line from then on."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        # Offsets have one more entry than there are tasks: the end of the file.
        self._offsets, self._numbers, hashes = array("Q"), array("I"), array("Q")
        self._has_ids = False
        try:
            self._open()
            for number, offset, line in _lines(path):
                fields = _fields(line, number, path)
                key = _text(fields, "id") if "id" in fields else ""
                self._has_ids = self._has_ids or bool(key)
                self._offsets.append(offset)
                self._numbers.append(number)
                hashes.append(hash_of(key or str(number)))
            self._offsets.append(os.fstat(self._file).st_size)
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error
        if not hashes:
            raise InvalidConfig(
                f"The task file {path} has no tasks.",
                reason=Reason.TASK_FILE_EMPTY,
                remedy='Write lines as {"question": "...", "answer": "... #### 7"}.',
            )
        self.hashes: NDArray[np.uint64] = np.frombuffer(hashes, dtype=np.uint64)
        self._by_hash = np.argsort(self.hashes, kind="stable").astype(np.uint32)
        self._require_different_keys()

    def __getstate__(self) -> dict[str, Any]:
        # An open file belongs to this object, which closes it at its end.
        return {name: value for name, value in vars(self).items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        try:
            self._open()
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self._file)

    @property
    def num_lines(self) -> int:
        return len(self._numbers)

    def key(self, index: int) -> str:
        return self.task(index).key if self._has_ids else str(self._numbers[index])

    def task(self, index: int) -> TaskData:
        """Read a task; blank lines behind it are cut off."""
        begin, end = self._offsets[index], self._offsets[index + 1]
        number = self._numbers[index]
        text = os.pread(self._file, end - begin, begin).partition(b"\n")[0]
        fields = _fields(text.decode("utf-8", errors="replace"), number, self.path)
        rest = {k: v for k, v in fields.items() if k not in ("question", "answer", "id")}
        return TaskData(
            key=_text(fields, "id") or str(number),
            question=_text(fields, "question"),
            answer=_text(fields, "answer"),
            metadata={k: v if isinstance(v, str) else json.dumps(v) for k, v in rest.items()},
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
                raise _broken(self.path, self._numbers[index], f"its id '{key}' was used before")


class _Lines(Sequence[str]):
    """Some lines of a file, as the keys of their tasks."""

    def __init__(self, file: _IndexedFile, indices: NDArray[np.uint32]) -> None:
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


def _lines(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield number, offset in bytes and text of each line that is not blank."""
    offset = 0
    # As bytes, which are split by newlines alone: JSON strings may hold every other line separator.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8")
            if text.strip():
                yield number, offset, text
            offset += len(line)


def _fields(line: str, number: int, path: Path) -> dict[str, Any]:
    """Return the columns of a line that is a task; InvalidConfig (TASK_FILE_BROKEN) otherwise."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise _broken(path, number, "it is not JSON") from None
    if not isinstance(fields, dict):
        raise _broken(path, number, "it is not a JSON object")
    if not _text(fields, "question"):
        raise _broken(path, number, "its question is missing or empty")
    answer = _text(fields, "answer")
    # An answer that ends so holds a truth; to normalise each one would take longer than to read it.
    if not (answer[-1:].isalnum() or truth_of(answer)):
        raise _broken(path, number, "its answer is missing or empty")
    return fields


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return str(value).strip() if isinstance(value, (str, int, float)) else ""


def _unreadable(path: Path, error: Exception) -> InvalidConfig:
    return InvalidConfig(
        f"The task file {path} cannot be read: {type(error).__name__}.",
        reason=Reason.TASK_FILE_UNREADABLE,
        remedy="Name a UTF-8 file with one JSON object per line.",
    )


def _broken(path: Path, number: int, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"Line {number} of {path} is broken: {why}.",
        reason=Reason.TASK_FILE_BROKEN,
        remedy='Write it as {"question": "...", "answer": "... #### 7"}, or delete the line.',
    )
