"""Failures from exceptions in authors' code.

A failure says which of the author's functions failed, with the exception's type and line. Only the
log shows the exception's text, under an error_id.
"""

from __future__ import annotations

import logging
from uuid import uuid4

from dialoop.errors import DialoopError
from dialoop.trajectory import Failure, Owner
from dialoop.user_functions import raised_at

_LOG = logging.getLogger(__name__)


def error_of(error: Exception, owner: Owner) -> Failure:
    """Return a failure whose reason is the error's own: a DialoopError's, or the type's name."""
    if isinstance(error, DialoopError):
        return Failure(owner=owner, reason=error.reason, message=str(error))
    return Failure(owner=owner, reason=type(error).__name__, message=raised_at(error))


def failure_of(error: BaseException, *, owner: Owner, reason: str, what: str) -> Failure:
    """Log the exception under a new error_id; return a failure with its type and line.

    The text of a DialoopError is written for callers, so the failure has it too.
    """
    error_id = uuid4().hex[:12]
    _LOG.error("%s failed, error_id %s", what, error_id, exc_info=error)
    why = str(error) if isinstance(error, DialoopError) else raised_at(error)
    return Failure(
        owner=owner, reason=reason, message=f"{what} failed: {why} (error_id {error_id})."
    )
