"""Why a process ended, in its own words: it writes them to a file that its starter named.

The last line of a log says little: libraries print there after the error. The first process to
write wins, since of several ranks the others fail only because one did.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from dialoop.errors import (
    Busy,
    CapacityExhausted,
    DeadlineExceeded,
    DialoopError,
    InvalidConfig,
    PermissionDenied,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
)
from dialoop.reasons import Reason
from pydantic import ValidationError

EXIT_REASON_VARIABLE = "DIALOOP_EXIT_REASON"
"""Variable with the path of the file."""

CONFIG_ERROR = 2
"""Exit code for a mistake in the settings, which a restart does not mend."""
ENDS_FOR_GOOD_VARIABLE = "DIALOOP_ENDS_FOR_GOOD"
"""Variable that is set where the starter starts again whatever ends with a code above 0."""

_OF_TOKENS = (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.SCOPE_MISSING)
_PASSING = (Unavailable, DeadlineExceeded, Busy, CapacityExhausted, PreconditionFailed)
_MISTAKES = (InvalidConfig, PermissionDenied, Unauthenticated, ValidationError)
# Another service says these about a name that only this service's settings contain.
_MISTAKEN_NAMES = frozenset({Reason.ENVIRONMENT_NOT_FOUND, Reason.SPLIT_NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReason:
    """The error that ended a process: a sentence, its reason, and the exit code it asks for.

    may_pass: whether it was of something else, such as a service that is away, and may be gone.
    """

    message: str
    reason: str
    exit_code: int
    may_pass: bool = False

    @classmethod
    def of(cls, error: BaseException) -> ExitReason:
        """Return the reason of an error, or of the first known error in a group of any depth."""
        cause = known_error(error) or _first(error)
        code = CONFIG_ERROR if is_mistake(cause) else 1
        if isinstance(cause, DialoopError):
            return cls(
                message=_one_line(str(cause)),
                reason=cause.reason,
                exit_code=code,
                may_pass=isinstance(cause, _PASSING),
            )
        if isinstance(cause, ValidationError):
            details = cause.errors(include_input=False)
            text = "; ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details) + "."
            return cls(message=_one_line(text), reason=Reason.INVALID_CONFIG, exit_code=code)
        text = f"{type(cause).__name__}: {cause}{_place_of(cause)}"
        return cls(message=_one_line(text), reason=Reason.INTERNAL, exit_code=code)

    @property
    def is_final(self) -> bool:
        """Return whether a start with the same settings cannot help.

        A token may change meanwhile, and a Redis may come back.
        """
        passing = (*_OF_TOKENS, Reason.STORE_UNAVAILABLE)
        return self.exit_code == CONFIG_ERROR and self.reason not in passing

    def end(self) -> NoReturn:
        """End the process with the exit code, or with 0 where any other would start it again."""
        for_good = self.is_final and bool(os.environ.get(ENDS_FOR_GOOD_VARIABLE))
        sys.exit(0 if for_good else self.exit_code)

    def write(self) -> None:
        """Write the file that the starter named; do nothing without one, or if it is written."""
        path = os.environ.get(EXIT_REASON_VARIABLE, "")
        if path:
            try:
                with Path(path).open("x", encoding="utf-8") as file:
                    json.dump(asdict(self), file)
            except OSError:  # another rank was first, or the disk is full: the log has it
                return


def read_exit_reason(path: Path) -> ExitReason | None:
    """Return what a process wrote; None if it wrote nothing, or was killed while it did."""
    try:
        return ExitReason(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_mistake(error: BaseException) -> bool:
    """Return whether the settings are wrong, so that starting again cannot help."""
    is_name = isinstance(error, DialoopError) and error.reason in _MISTAKEN_NAMES
    return is_name or isinstance(error, _MISTAKES)


def known_error(error: BaseException) -> DialoopError | ValidationError | None:
    """Return the error, or the first known one in a task group's error; None if there is none.

    A mistake in the settings comes first: other tasks may have failed because of it.
    """
    if isinstance(error, (DialoopError, ValidationError)):
        return error
    if isinstance(error, BaseExceptionGroup):
        errors = [e for inner in error.exceptions if (e := known_error(inner)) is not None]
        return min(errors, key=lambda e: not is_mistake(e), default=None)
    return None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
