r"""Tasks from a file: one JSON object per line with `question` and `answer`, in GSM8K's form.

{"question": "Tom has 3 apples and buys 4. How many?", "answer": "3+4=7\n#### 7"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dialoop.environments.episode import TaskData
from dialoop.environments.rewards.functions import truth_of
from dialoop.environments.tasks.source import TaskSource, share_of, task_not_found
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason


class JsonlTasks(TaskSource):
    """The lines of a file as split "train"; "heldout" is another file, or a share of the lines.

    Each line is a JSON object with the columns `question` (what the policy reads) and `answer` (the
    truth, or a text that ends in `#### truth`). The column `id` is optional: it is the task's key,
    which else is the line number. Other columns become metadata, which the policy never sees. A
    hash of the key decides which lines are in the share `heldout_fraction`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        heldout_path: str | Path | None = None,
        heldout_fraction: float = 0.0,
    ) -> None:
        if not 0 <= heldout_fraction < 1 or (heldout_path and heldout_fraction):
            raise InvalidConfig(
                f"heldout_fraction is {heldout_fraction} and heldout_path is {heldout_path!r}.",
                remedy="Use a share from 0 to below 1, and only one of the two.",
            )
        train = _read(Path(path))
        heldout = _read(Path(heldout_path)) if heldout_path else {}
        if heldout_fraction:
            heldout = {k: t for k, t in train.items() if share_of(k) < heldout_fraction}
            train = {k: t for k, t in train.items() if k not in heldout}
        self._tasks = {"train": train, "heldout": heldout} if heldout else {"train": train}
        self._keys = {split: tuple(tasks) for split, tasks in self._tasks.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return ("train",) or ("train", "heldout")."""
        return tuple(self._tasks)

    def keys(self, split: str) -> Sequence[str]:
        """Return the keys in the order of the file."""
        return self._keys[self.require_split(split)]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a line."""
        split = self.require_split(split)
        if key not in self._tasks[split]:
            raise task_not_found(split, key)
        return self._tasks[split][key]


def _read(path: Path) -> dict[str, TaskData]:
    try:
        # Split by newlines alone, since JSON strings may hold every other line separator.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The task file {path} cannot be read: {type(error).__name__}.",
            reason=Reason.TASK_FILE_UNREADABLE,
            remedy="Name a UTF-8 file with one JSON object per line.",
        ) from error
    tasks: dict[str, TaskData] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            task = _task(line, number, path)
            if task.key in tasks:
                raise _broken(path, number, f"its id '{task.key}' was used before")
            tasks[task.key] = task
    if not tasks:
        raise InvalidConfig(
            f"The task file {path} has no tasks.",
            reason=Reason.TASK_FILE_EMPTY,
            remedy='Write lines as {"question": "...", "answer": "... #### 7"}.',
        )
    return tasks


def _task(line: str, number: int, path: Path) -> TaskData:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise _broken(path, number, "it is not JSON") from None
    if not isinstance(fields, dict):
        raise _broken(path, number, "it is not a JSON object")
    question, answer = _text(fields, "question"), _text(fields, "answer")
    if not question or not truth_of(answer):
        missing = "question" if not question else "answer"
        raise _broken(path, number, f"its {missing} is missing or empty")
    rest = {k: v for k, v in fields.items() if k not in ("question", "answer", "id")}
    return TaskData(
        key=_text(fields, "id") or str(number),
        question=question,
        answer=answer,
        metadata={k: v if isinstance(v, str) else json.dumps(v) for k, v in rest.items()},
    )


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return str(value).strip() if isinstance(value, (str, int, float)) else ""


def _broken(path: Path, number: int, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"Line {number} of {path} is broken: {why}.",
        reason=Reason.TASK_FILE_BROKEN,
        remedy='Write it as {"question": "...", "answer": "... #### 7"}, or delete the line.',
    )
