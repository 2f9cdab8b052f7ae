"""gRPC failures back to the one error tree, with reason and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from dialoop.errors import (
    ERRORS_BY_STATUS,
    CapacityExhausted,
    DeadlineExceeded,
    DialoopError,
    InternalError,
    Status,
    Unavailable,
)
from dialoop.reasons import Reason, reason_of

if TYPE_CHECKING:
    from dialoop.v1.environment_service_pb2 import ItemError

STARTED_METADATA = "dialoop-started"
"""Key of the metadata with which a service says at once that it works on a call."""
DEATHS: frozenset[str] = frozenset({Reason.ENGINE_DIED, Reason.SERVICE_DIED})
"""Reasons of a request under which an engine or a service ended: it may be the cause."""

# Errors of a retryable class that would only repeat themselves: the message stays too large, the
# cursor that a collector expected stays behind, and the answer takes as long again.
_HOPELESS = frozenset({Reason.MESSAGE_TOO_LARGE, Reason.CURSOR_MOVED, Reason.ANSWER_TIMED_OUT})
# Errors of a retryable class that one request can have while others succeed.
_OWN_FAILURES = frozenset(
    {Reason.OPEN_FAILED, Reason.OPEN_TIMEOUT, Reason.TOO_MANY_RECORDINGS, *DEATHS}
)


def error_of(failure: grpc.aio.AioRpcError, *, address: str) -> DialoopError:
    """Return the error a service raised, or the nearest one when gRPC itself failed."""
    code = failure.code()
    text = failure.details() or f"{address} answered {code.name}."
    info = _info_of(failure)
    if info is not None:
        remedy = info.metadata.get("remedy", "")
        return _kind_of(code.value[0])(text, reason=reason_of(info.reason), remedy=remedy)
    if code is grpc.StatusCode.UNAVAILABLE and _is_started(failure):
        return Unavailable(
            f"The connection to {address} broke while the request was worked on: {text}",
            reason=Reason.SERVICE_DIED,
            remedy="See the service's log. Leave the request out if it ends the service again.",
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(
            f"{address} is not reachable: {text}", remedy="Is the service running there?"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        remedy = "Send fewer or shorter items, or raise max_message_bytes on both sides."
        return CapacityExhausted(text, reason=Reason.MESSAGE_TOO_LARGE, remedy=remedy)
    return _kind_of(code.value[0])(text)


def error_of_item(item: ItemError) -> DialoopError:
    """Return the error of one item of a batch or stream."""
    return _kind_of(item.code)(item.message, reason=reason_of(item.reason) if item.reason else None)


def is_worth_retrying(error: DialoopError) -> bool:
    """Return whether the same request may succeed later."""
    return error.retryable and error.reason not in _HOPELESS


def is_outage(error: DialoopError) -> bool:
    """Return whether the service was away or full, and the request itself is not at fault.

    Work that failed so may be repeated without end. Work that takes too long, whose episode does
    not open, or that leaves recordings open until there is no room, may be at fault itself: whoever
    repeats it must count.
    """
    is_own = isinstance(error, DeadlineExceeded) or error.reason in _OWN_FAILURES
    return is_worth_retrying(error) and not is_own


def _kind_of(code: int) -> type[DialoopError]:
    is_known = code in set(Status)
    return ERRORS_BY_STATUS[Status(code)] if is_known else InternalError


def _is_started(failure: grpc.aio.AioRpcError) -> bool:
    return any(key == STARTED_METADATA for key, _ in failure.initial_metadata() or ())


def _info_of(failure: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(failure)
    except ValueError:  # a proxy changed the status and left the details
        return None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            return info
    return None


def require_count(num_given: int, num_asked: int, what: str) -> None:
    """Raise InternalError where a service gave another number of `what` than asked for."""
    if num_given != num_asked:
        raise InternalError(
            f"The service gave {num_given} of {num_asked} {what}.",
            remedy="Look for a service or a proxy of another version of Dialoop.",
        )
