"""A file lock on a device: engines that sample share it, or the trainer holds it alone.

lock = DeviceLock(run_dir / "device.lock")
if lock.try_own():      # only while nobody shares or owns it
    ...
    lock.release()

The kernel keeps the lock (flock) and releases it when its holder ends, even if it is killed. So two
processes never own the device at once. The lock works among processes of one machine. The file is
never removed, because a lock on a file that another process has replaced protects nothing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

DEVICE_LOCK = "device.lock"
"""The file's name in a run's directory."""

_LOOK_EVERY_S = 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class DeviceLock:
    """The lock as one holder sees it; each holder has an object of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock, alone or with others."""
        return self._file is not None

    def try_share(self) -> bool:
        """Hold the lock together with others. Return False while somebody holds it alone."""
        return self._try(fcntl.LOCK_SH)

    def try_own(self) -> bool:
        """Hold the lock alone. Return False while anybody else holds it."""
        return self._try(fcntl.LOCK_EX)

    async def share(self, *, within_s: float | None = None) -> bool:
        """Wait for `within_s` at most until the lock can be shared; return whether it is."""
        loop = asyncio.get_running_loop()
        ends_at = None if within_s is None else loop.time() + within_s
        while not self.try_share():
            if ends_at is not None and loop.time() >= ends_at:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._file is None:
            return
        # Closing is not enough: a forked child with a copy of the file would keep the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = None

    def _try(self, kind: int) -> bool:
        if self._file is not None:
            return True
        file = _open(self.path)
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _TAKEN:
                return False
            raise _no_locks(self.path, error) from error
        self._file = file
        return True


def is_owned(path: Path) -> bool:
    """Return whether somebody holds the lock alone at this moment."""
    lock = DeviceLock(path)
    is_free = lock.try_share()
    lock.release()
    return not is_free


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    except OSError as error:
        raise _no_locks(path, error) from error


def _no_locks(path: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(
        f"Cannot lock {path}: {error.strerror}.",
        reason=Reason.NO_DEVICE_LOCK,
        remedy="Put the device lock on a local disk that all holders may write to.",
    )
