"""Write files that survive a power loss, and that appear whole or not at all.

A checkpoint, a journal line and a pointer are on the disk before the queue is told that groups are
trained. A write that fails (a full disk, a quota) leaves everything as it was and is a
PreconditionFailed (WRITE_FAILED), so the trainer goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason

MAKE_ROOM = "Make room on the disk of the run's directory, and allow the trainer to write there."
"""What to do where a write failed (WRITE_FAILED)."""


@contextmanager
def whole_file(
    path: Path, *, sync: bool = True, errors: tuple[type[Exception], ...] = ()
) -> Iterator[Path]:
    """Yield a path to write to; afterwards the content is at `path`, and with `sync` on the disk.

    An error inside leaves `path` as it was. `errors` are those that a library raises, beside
    OSError, when it cannot write.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with named_failures(path, *errors):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if sync:
                sync_file(temporary)
            temporary.replace(path)
            if sync:
                sync_file(path.parent)
    finally:
        with suppress(OSError):  # nothing is there, or the folder is none: the error above says so
            temporary.unlink()


@contextmanager
def named_failures(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise PreconditionFailed (WRITE_FAILED) for a failed write inside."""
    kinds: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except kinds as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PreconditionFailed(
            f"{path.parent.name}/{path.name} could not be written: {why}.",
            reason=Reason.WRITE_FAILED,
            remedy=MAKE_ROOM,
        ) from error


@contextmanager
def named_reads(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise PreconditionFailed (READ_FAILED) for a read that fails inside.

    `errors` are those that a library raises, beside OSError and MemoryError.
    """
    kinds: tuple[type[Exception], ...] = (OSError, MemoryError, *errors)
    try:
        yield
    except kinds as error:
        raise read_failed(path, why_unread(error)) from error


def why_unread(error: Exception) -> str:
    """Return the system's words for a failed read, or the kind of another error."""
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


def read_failed(path: Path, why: str) -> PreconditionFailed:
    """Return the error that a file or folder of the run could not be read."""
    return PreconditionFailed(
        f"{path.parent.name}/{path.name} could not be read: {why}.",
        reason=Reason.READ_FAILED,
        remedy="Let the trainer read the run's directory, mend the disk or give the trainer more "
        "memory, and start it again. No file has changed.",
    )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; a reader sees the old one or the new one, never a part."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def sync_file(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Bring a directory with all that is in it to the disk."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        sync_file(path)
