"""Failures from exceptions in authors' code.

A failure says which of the author's functions failed, with the exception's type and line. Only the
log shows the exception's text, under an error_id. The log has one line for each kind of failure in
a minute, so failures of one kind share their error_id.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Hashable
from uuid import uuid4

from dialoop.errors import DialoopError
from dialoop.trajectory import Failure, Owner
from dialoop.user_functions import TimeIsUp, raised_at

_LOG = logging.getLogger(__name__)

_EVERY_S = 60.0
_MAX_KINDS = 1000


class Repeats:
    """Tells when the log is due a line on what happens again and again.

    It is due one for the first of a kind, and then for the next one after each minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def due(self, kind: Hashable) -> int:
        """Return how many of a kind there were since its last line, this one too; or 0: no line."""
        now = self._clock()
        logged_at, num_since = self._kinds.get(kind, (-_EVERY_S, 0))
        if now - logged_at < _EVERY_S:
            self._kinds[kind] = (logged_at, num_since + 1)
            return 0
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        return num_since + 1

    def forget(self) -> None:
        """Begin anew: the next of each kind is the first."""
        self._kinds.clear()


REPEATS = Repeats()
"""What this process has logged of its failures."""
_ERROR_IDS: dict[Hashable, str] = {}
_ERROR_ID = re.compile("error_id ([0-9a-f]{12})")


def error_of(error: Exception, owner: Owner) -> Failure:
    """Return a failure whose reason is the error's own: a DialoopError's, or the type's name."""
    if isinstance(error, DialoopError):
        return Failure(owner=owner, reason=error.reason, message=str(error))
    return Failure(owner=owner, reason=type(error).__name__, message=raised_at(error))


def failure_of(error: BaseException, *, owner: Owner, reason: str, what: str) -> Failure:
    """Log the exception under an error_id; return a failure with its type and line.

    The text of a DialoopError is written for callers, so the failure has it too.
    """
    error_id = log_failure(error, what)
    why = str(error) if isinstance(error, DialoopError | TimeIsUp) else raised_at(error)
    return Failure(
        owner=owner, reason=reason, message=f"{what} failed: {why} (error_id {error_id})."
    )


def log_failure(error: BaseException, what: str) -> str:
    """Log that something failed, once a minute with how often; return the error_id in that line."""
    kind = (what, raised_at(error))
    if len(_ERROR_IDS) >= _MAX_KINDS:
        _ERROR_IDS.clear()
    text = f"{what} failed, error_id {(error_id := uuid4().hex[:12])}"
    if log_repeated(_LOG, logging.ERROR, text, kind=kind, error=error):
        _ERROR_IDS[kind] = error_id
    return _ERROR_IDS.setdefault(kind, error_id)


def log_repeated(
    log: logging.Logger,
    level: int,
    text: str,
    *,
    kind: Hashable,
    error: BaseException | None = None,
    **extra: object,
) -> bool:
    """Log a text and how often its kind came, where a line is due; return whether it was.

    There is none for a text with the error_id of a line that this process has logged.
    """
    error_id = _ERROR_ID.search(text) if error is None else None
    num = 0 if error_id and error_id[1] in _ERROR_IDS.values() else REPEATS.due(kind)
    if num:
        times = f" ({num} times since the last line)" if num > 1 else ""
        log.log(level, "%s", text + times, exc_info=error, extra=extra)
    return bool(num)
