"""Lease ids say what is leased: "<kind>/<token>/<task_id>".

format_lease("scored", 1700000000000001, "arithmetic/0")  # "scored/1700000000000001/arithmetic/0"
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a lease holds: a task, or a group in one of the stages."""

    TASK = "task"
    UNSCORED = "unscored"
    SCORED = "scored"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseName:
    """A lease id taken apart."""

    kind: Kind
    task_id: str


def format_lease(kind: Kind, token: int, task_id: str) -> str:
    """The id of a lease; the token never repeats within a run."""
    return f"{kind}/{token}/{task_id}"


def parse_lease(lease_id: str) -> LeaseName | None:
    """The lease's kind and task; None if the id was never one of ours."""
    kind, _, rest = lease_id.partition("/")
    token, slash, task_id = rest.partition("/")
    if kind not in set(Kind) or not token.isdigit() or not slash:
        return None
    return LeaseName(kind=Kind(kind), task_id=task_id)
