"""The messages for the proto's reasons why the queue refuses something."""

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
        Reason.LEASE_LOST: "The lease was lost: another worker has its work, or the group closed.",
        Reason.WRONG_SIZE: "The group does not have as many trajectories as its task asks for.",
        Reason.DIGEST_MISMATCH: "The queue keeps that member, turn or group with other content.",
        Reason.TRAJECTORY_REPEATED: "Another member of the group has that trajectory_id.",
        Reason.TOO_LARGE: "With this its group, or episode, would not fit one message.",
        Reason.STEP_GAP: "The turn before it is not kept.",
        Reason.NO_ROOM: "As many groups wait as max_waiting_groups allows: it was dropped.",
        Reason.FUTURE_VERSION: "Tokens have a policy version that was never announced.",
    }
)

_REFUSALS: Mapping[Reason, tuple[type[DialoopError], str, str]] = MappingProxyType(
    {
        Reason.CURSOR_MOVED: (
            Busy,
            "The cursor is '{}' now.",
            "Another collector offered that page: continue from the present cursor.",
        ),
        Reason.VERSION_NOT_NEWER: (
            PreconditionFailed,
            "The announced policy is not newer than {}.",
            "Use a higher number in the present lineage, or a new lineage after a restore.",
        ),
        Reason.GROUP_NOT_FOUND: (
            NotFound,
            "There is no dead letter '{}'.",
            "Take a group_id from ListDeadLetters.",
        ),
        Reason.MEMBER_NOT_FOUND: (
            NotFound,
            "No instance '{}' of that epoch is there.",
            "List the instances: it left, its lease ended, or it was started again.",
        ),
        Reason.MEMBER_MOVED: (
            PreconditionFailed,
            "The instance '{}' has joined at another address.",
            "Join again with epoch 0: who has moved is another instance, and proves itself anew.",
        ),
        Reason.MEMBER_REPLACED: (
            PreconditionFailed,
            "Another instance has the name '{}' now.",
            "End this one. If both shall serve, give each a name of its own.",
        ),
        Reason.STORE_UNAVAILABLE: (
            Unavailable,
            "The queue's store does not answer.",
            "Try again: the service reconnects by itself.",
        ),
        Reason.STORE_FORMAT: (
            PreconditionFailed,
            "Another version of Dialoop wrote the queue of this run, in a format that is not read.",
            "Purge the run, or end it with the version that began it.",
        ),
        Reason.STORE_FULL: (
            CapacityExhausted,
            "The queue's store is out of memory.",
            "It takes new work again once groups are trained. If none can be: raise maxmemory of "
            "Redis, or lower pipeline_depth or groups_per_train_step.",
        ),
    }
)


def refusal(reason: Reason, detail: str = "") -> DialoopError:
    """Return the error for a reason; `detail` fills its message.

    refusal(Reason.GROUP_NOT_FOUND, "a")  # NotFound("There is no dead letter 'a'.")
    """
    kind, message, remedy = _REFUSALS[reason]
    return kind(message.format(detail), reason=reason, remedy=remedy)
