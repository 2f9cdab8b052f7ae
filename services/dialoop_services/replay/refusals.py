"""Why the queue refuses something, in words; the reasons are those of the proto."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dialoop.errors import Busy, CapacityExhausted, NotFound, PreconditionFailed, Unavailable
from dialoop.sequences import PolicyVersion

APPEND_MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        "UNKNOWN_TASK": "No task of that id and purpose was offered in this run.",
        "LEASE_LOST": "The lease ran out, or was given for another attempt of the task.",
        "WRONG_SIZE": "The group does not hold the number of trajectories its task asks for.",
        "DIGEST_MISMATCH": "A group of that id with other content is there already; it stands.",
        "FUTURE_VERSION": "Tokens claim a policy version that was never announced.",
    }
)


def cursor_moved(cursor: str) -> Busy:
    """The page was offered by somebody else."""
    return Busy(
        f"The cursor stands at '{cursor}'.",
        reason="CURSOR_MOVED",
        remedy="Another collector offered that page: go on from the present cursor.",
    )


def version_not_newer(version: PolicyVersion, current: PolicyVersion | None) -> PreconditionFailed:
    """A version that goes back, or belongs to a lineage that was given up."""
    return PreconditionFailed(
        f"Policy {version} is not newer than {current}.",
        reason="VERSION_NOT_NEWER",
        remedy="Count on in the present lineage, or start a new one after a restore.",
    )


def group_not_found(group_id: str) -> NotFound:
    """No dead letter of that id."""
    return NotFound(
        f"No dead letter '{group_id}'.",
        reason="GROUP_NOT_FOUND",
        remedy="ListDeadLetters names those there are.",
    )


def batch_too_large() -> CapacityExhausted:
    """The wanted groups do not fit one message."""
    return CapacityExhausted(
        "min_groups groups do not fit one message.",
        reason="TOO_LARGE",
        remedy="Lower min_groups, or raise max_message_bytes here and at the caller.",
    )


def store_unavailable() -> Unavailable:
    """Redis does not answer at the moment."""
    return Unavailable(
        "The queue's store does not answer.",
        reason="STORE_UNAVAILABLE",
        remedy="Try again: the service reconnects by itself.",
    )


def store_full() -> CapacityExhausted:
    """Redis has reached its memory limit."""
    return CapacityExhausted(
        "The queue's store is out of memory.",
        reason="STORE_FULL",
        remedy="Raise Redis' maxmemory or lower max_outstanding_groups.",
    )
