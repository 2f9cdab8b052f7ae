"""The one error tree of Dialoop: every error has a reason, a status and a remedy.

    DialoopError
      InvalidInput            INVALID_ARGUMENT    400  the caller sent something wrong
        InvalidHistory
        InvalidSequence
        InvalidConfig
      NotFound                NOT_FOUND           404
      AlreadyExists           ALREADY_EXISTS      409
      PreconditionFailed      FAILED_PRECONDITION 409  right request, wrong moment
      Busy                    ABORTED             409  another request is at work: try again
      CapacityExhausted       RESOURCE_EXHAUSTED  429
      Unauthenticated         UNAUTHENTICATED     401
      PermissionDenied        PERMISSION_DENIED   403
      Unsupported             UNIMPLEMENTED       501
      Unavailable             UNAVAILABLE         503  not now: try again
      DeadlineExceeded        DEADLINE_EXCEEDED   504
      DataLost                DATA_LOSS           500  a checksum does not match
      InternalError           INTERNAL            500  carries an error_id and no details

`reason` is the machine-readable name, a member of `dialoop.reasons.Reason`; match on it, never on
the message. Errors of your own environment take `OtherReason("BOARD_LOCKED")`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from dialoop.reasons import OtherReason, Reason


class Status(IntEnum):
    """The google.rpc codes Dialoop uses; the numbers are those of gRPC."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class DialoopWarning(UserWarning):
    """Dialoop did something else than the caller asked for; the text says what."""


class DialoopError(Exception):
    """Base of all errors: `message` says what is wrong, `remedy` what to do about it."""

    status: ClassVar[Status] = Status.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    default_reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(
        self, message: str, *, reason: Reason | OtherReason | None = None, remedy: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason: Reason | OtherReason = reason or self.default_reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Stay picklable although the arguments are keyword-only."""
        return (_rebuild, (type(self), self.message, self.reason, self.remedy))

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def _rebuild(
    kind: type[DialoopError], message: str, reason: Reason | OtherReason, remedy: str
) -> DialoopError:
    return kind(message, reason=reason, remedy=remedy)


class InvalidInput(DialoopError, ValueError):
    """The request or value is wrong whatever the state of the service."""

    status = Status.INVALID_ARGUMENT
    http_status = 400
    default_reason = Reason.INVALID_INPUT


class InvalidHistory(InvalidInput):
    """A history breaks its contract (`full` missing, or not prompt followed by response)."""

    default_reason = Reason.INVALID_HISTORY


class InvalidSequence(InvalidInput):
    """Token ids, segments and log-probs do not agree."""

    default_reason = Reason.INVALID_SEQUENCE


class InvalidConfig(InvalidInput):
    """A setting is unknown, missing or out of range."""

    default_reason = Reason.INVALID_CONFIG


class NotFound(DialoopError):
    """The named thing does not exist (any more)."""

    status = Status.NOT_FOUND
    http_status = 404
    default_reason = Reason.NOT_FOUND


class AlreadyExists(DialoopError):
    """The id is taken by something different."""

    status = Status.ALREADY_EXISTS
    http_status = 409
    default_reason = Reason.ALREADY_EXISTS


class PreconditionFailed(DialoopError):
    """The request is well formed but does not fit the present state."""

    status = Status.FAILED_PRECONDITION
    http_status = 409
    default_reason = Reason.FAILED_PRECONDITION


class Busy(DialoopError):
    """Another request is at work on the same thing."""

    status = Status.ABORTED
    http_status = 409
    retryable = True
    default_reason = Reason.BUSY


class CapacityExhausted(DialoopError):
    """No room now; wait and try again."""

    status = Status.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True
    default_reason = Reason.CAPACITY


class Unauthenticated(DialoopError):
    """The bearer token is missing or wrong."""

    status = Status.UNAUTHENTICATED
    http_status = 401
    default_reason = Reason.UNAUTHENTICATED


class PermissionDenied(DialoopError):
    """The caller is known and may not do this."""

    status = Status.PERMISSION_DENIED
    http_status = 403
    default_reason = Reason.PERMISSION_DENIED


class Unsupported(DialoopError):
    """This service, engine or store cannot do it."""

    status = Status.UNIMPLEMENTED
    http_status = 501
    default_reason = Reason.UNSUPPORTED


class Unavailable(DialoopError):
    """The service (or one behind it) cannot be reached, or is not ready."""

    status = Status.UNAVAILABLE
    http_status = 503
    retryable = True
    default_reason = Reason.UNAVAILABLE


class DeadlineExceeded(DialoopError):
    """The answer did not come in time."""

    status = Status.DEADLINE_EXCEEDED
    http_status = 504
    retryable = True
    default_reason = Reason.DEADLINE_EXCEEDED


class DataLost(DialoopError):
    """Bytes arrived that are not the bytes that were sent."""

    status = Status.DATA_LOSS
    default_reason = Reason.CHECKSUM_MISMATCH


class InternalError(DialoopError):
    """A bug in Dialoop; a service's message holds only an error_id to look up in its log."""


ERRORS_BY_STATUS: dict[Status, type[DialoopError]] = {
    kind.status: kind
    for kind in (
        InvalidInput,
        NotFound,
        AlreadyExists,
        PreconditionFailed,
        Busy,
        CapacityExhausted,
        Unauthenticated,
        PermissionDenied,
        Unsupported,
        Unavailable,
        DeadlineExceeded,
        DataLost,
        InternalError,
    )
}
