"""Errors on the wire: a DialoopError becomes a gRPC status with google.rpc.ErrorInfo.

Any other exception becomes INTERNAL with an error_id. Its text goes to this service's log only.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import grpc
from dialoop.errors import DialoopError, InternalError, Unsupported
from dialoop.reasons import Reason
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

log = logging.getLogger(__name__)

DOMAIN = "dialoop"
# A status travels in HTTP/2 headers, of which gRPC clients refuse more than 8 KiB by default. The
# message is there twice: percent-encoded (up to three bytes for one) and in the base64 details.
_MAX_BYTES = 1000


class LoggedError(InternalError):
    """An unexpected error as a caller may see it: an id to look up in the service's log."""

    def __init__(self, error_id: str) -> None:
        super().__init__(
            f"Internal error {error_id}.", remedy="Look for this error_id in the service's log."
        )
        self.error_id = error_id


def is_not_implemented(error: Exception, context: Any) -> bool:
    """Return whether the generated base class answered, because the servicer lacks the method."""
    is_unimplemented = context.code() is grpc.StatusCode.UNIMPLEMENTED
    return isinstance(error, NotImplementedError) and is_unimplemented


def not_served(rpc: str, *, remedy: str = "") -> Unsupported:
    """Return the error of a rpc that this service does not answer."""
    return Unsupported(
        f"This service does not serve {rpc}.",
        reason=Reason.NOT_SERVED,
        remedy=remedy or "Call a service that serves it.",
    )


def public_error(error: BaseException) -> DialoopError:
    """Return the error a caller may see; log any other under an error_id."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # what a task group of a method was ended by
    if isinstance(error, DialoopError) and not isinstance(error, InternalError):
        return error
    error_id = uuid.uuid4().hex
    log.error("Internal error.", exc_info=error, extra={"error_id": error_id})
    return LoggedError(error_id)


def status_of(error: DialoopError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error: its message, reason and remedy."""
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={"remedy": _cut(error.remedy)}
        )
    )
    return status_pb2.Status(code=int(error.status), message=_cut(error.message), details=[detail])


def _cut(text: str) -> str:
    """Return the text cut to valid UTF-8 that fits; a lone surrogate becomes a question mark."""
    return text.encode(errors="replace")[:_MAX_BYTES].decode(errors="ignore")
