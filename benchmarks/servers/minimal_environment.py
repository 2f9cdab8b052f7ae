"""Define the smallest environment: one task, no reward, the next prompt is the previous full."""

from __future__ import annotations

from collections.abc import Sequence

from dialoop.environments import ChatEnv, TaskData
from dialoop.environments.tasks.source import TaskSource
from dialoop.errors import NotFound


class OneTask(TaskSource):
    """`train` has one task, `0`."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The only split."""
        return ("train",)

    def keys(self, split: str) -> Sequence[str]:
        """Return the only key."""
        return ("0",)

    def get(self, split: str, key: str) -> TaskData:
        """Return the only task."""
        if (split, key) != ("train", "0"):
            raise NotFound("There is one task.", reason="TASK_NOT_FOUND")
        return TaskData(key="0", question="hello")


environment = ChatEnv(name="minimal", tasks=OneTask())
