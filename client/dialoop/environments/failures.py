"""Failures from exceptions in authors' code: only the log shows the text, under an error_id."""

from __future__ import annotations

import logging
from uuid import uuid4

from dialoop.trajectory import Failure, Owner

_LOG = logging.getLogger(__name__)


def failure_of(error: BaseException, *, owner: Owner, reason: str, what: str) -> Failure:
    """Log the exception under a new error_id and return a failure without its text."""
    error_id = uuid4().hex[:12]
    _LOG.error("%s failed, error_id %s", what, error_id, exc_info=error)
    return Failure(owner=owner, reason=reason, message=f"{what} failed (error_id {error_id}).")
