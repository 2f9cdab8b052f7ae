"""Format and parse lease ids, which name what is leased: "<kind>/<token>/<task_id>".

format_lease("scored", 1700000000000001, "arithmetic/0")  # "scored/1700000000000001/arithmetic/0"
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is leased: a task, or a group in one of the stages."""

    TASK = "task"
    UNSCORED = "unscored"
    SCORED = "scored"
    EVALUATION = "evaluation"


_KINDS = {str(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseName:
    """The parts of a lease id."""

    kind: Kind
    task_id: str


def format_lease(kind: Kind, token: int, task_id: str) -> str:
    """Return the id of a lease; within a run a token is used once."""
    return f"{kind}/{token}/{task_id}"


def parse_lease(lease_id: str) -> LeaseName | None:
    """Return the lease's kind and task, or None for text that is not a lease id."""
    name, _, rest = lease_id.partition("/")
    token, slash, task_id = rest.partition("/")
    kind = _KINDS.get(name)
    if kind is None or not token.isdigit() or not slash:
        return None
    return LeaseName(kind=kind, task_id=task_id)
