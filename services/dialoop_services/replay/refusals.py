"""Why the queue refuses something, in words; the reasons are those of the proto."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dialoop.errors import (
    Busy,
    CapacityExhausted,
    DialoopError,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from dialoop.reasons import Reason

APPEND_MESSAGES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.UNKNOWN_TASK: "No task of that id and purpose was offered in this run.",
        Reason.LEASE_LOST: "The lease ran out, or was given for another attempt of the task.",
        Reason.WRONG_SIZE: "The group does not hold the number of trajectories its task asks for.",
        Reason.DIGEST_MISMATCH: "A group of that id with other content is there; it stands.",
        Reason.FUTURE_VERSION: "Tokens claim a policy version that was never announced.",
    }
)

_REFUSALS: Mapping[Reason, tuple[type[DialoopError], str, str]] = MappingProxyType(
    {
        Reason.CURSOR_MOVED: (
            Busy,
            "The cursor stands at '{}'.",
            "Another collector offered that page: go on from the present cursor.",
        ),
        Reason.VERSION_NOT_NEWER: (
            PreconditionFailed,
            "The announced policy is not newer than {}.",
            "Count on in the present lineage, or start a new one after a restore.",
        ),
        Reason.GROUP_NOT_FOUND: (
            NotFound,
            "No dead letter '{}'.",
            "ListDeadLetters names those there are.",
        ),
        Reason.TOO_LARGE: (
            CapacityExhausted,
            "min_groups groups do not fit one message.",
            "Lower min_groups, or raise max_message_bytes here and at the caller.",
        ),
        Reason.STORE_UNAVAILABLE: (
            Unavailable,
            "The queue's store does not answer.",
            "Try again: the service reconnects by itself.",
        ),
        Reason.STORE_FULL: (
            CapacityExhausted,
            "The queue's store is out of memory.",
            "Raise Redis' maxmemory or lower max_outstanding_groups.",
        ),
    }
)


def refusal(reason: Reason, detail: str = "") -> DialoopError:
    """The error of a reason; `detail` is what its message names.

    refusal(Reason.GROUP_NOT_FOUND, "a#1")  # NotFound("No dead letter 'a#1'.")
    """
    kind, message, remedy = _REFUSALS[reason]
    return kind(message.format(detail), reason=reason, remedy=remedy)
