"""Define the smallest environment: one task, no reward, the next prompt is the previous full.

With TOGGLES_CHECKS the service that imports it stops at SIGUSR1 to ask for a right, and to limit
calls and what is in them; at the next one it begins again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from dialoop.environments import ChatEnv, TaskData
from dialoop.environments.tasks.source import TaskSource
from dialoop.errors import NotFound
from dialoop_services.rest import endpoint
from dialoop_services.runtime import handlers
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import CallLimits

TOGGLES_CHECKS = "BENCHMARK_TOGGLES_CHECKS"


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


CHECKS = (
    (Token, "require"),
    (Token, "require_in"),
    (CallLimits, "place"),
    (CallLimits, "require_few_items"),
    (endpoint, "require_few_values"),
    (endpoint, "require_unique_keys"),
    (endpoint, "while_allowed"),
    (handlers, "while_allowed"),
)


def _toggle_checks(*_: object) -> None:
    """Exchange each check and what asks nothing."""
    for place, name in CHECKS:
        check = getattr(place, name)
        setattr(place, name, getattr(check, "instead_of", nothing_for(check)))


def nothing_for(check: Any) -> Any:
    """Return what asks nothing, and knows the check."""

    def nothing(*_: object, **__: object) -> Any:
        return nullcontext()

    nothing.instead_of = check  # type: ignore[attr-defined]
    return nothing


if os.environ.get(TOGGLES_CHECKS):
    signal.signal(signal.SIGUSR1, _toggle_checks)
