"""Who owns a device: one file lock, shared by the engines that sample on it or held by the trainer.

lock = DeviceLock(run_dir / "device.lock")
if lock.try_own():      # only while nobody shares or owns it
    ...
    lock.release()

The kernel keeps the lock (flock) and takes it back when its holder ends, however it ends: a killed
process leaves nothing behind, and two processes cannot both believe that the device is theirs. It
works among processes of one machine, which is where a device is. The file is never removed: a lock
on a file that another process has replaced would protect nothing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from pathlib import Path

DEVICE_LOCK = "device.lock"
"""The file's name in a run's directory."""

_LOOK_EVERY_S = 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class DeviceLock:
    """One holder's hold on a device; each holder has an object of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it, alone or with others."""
        return self._file is not None

    def try_share(self) -> bool:
        """Hold it together with others who share it; False while somebody owns it."""
        return self._try(fcntl.LOCK_SH)

    def try_own(self) -> bool:
        """Hold it alone; False while anybody else holds it."""
        return self._try(fcntl.LOCK_EX)

    async def share(self, *, within_s: float | None = None) -> bool:
        """Wait until it can be shared, for `within_s` at most; whether it is."""
        loop = asyncio.get_running_loop()
        ends_at = None if within_s is None else loop.time() + within_s
        while not self.try_share():
            if ends_at is not None and loop.time() >= ends_at:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def release(self) -> None:
        """Let go; nothing happens when it is not held."""
        if self._file is None:
            return
        # Said aloud: a forked child that has a copy of the file must not keep the lock with it.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = None

    def _try(self, kind: int) -> bool:
        if self._file is not None:
            return True
        file = _opened(self.path)
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
    """Whether somebody holds the lock alone at this moment."""
    lock = DeviceLock(path)
    is_free = lock.try_share()
    lock.release()
    return not is_free


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    except OSError as error:
        raise _no_locks(path, error) from error


def _no_locks(path: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(
        f"{path} cannot be locked: {error.strerror}.",
        reason=Reason.NO_DEVICE_LOCK,
        remedy="Put the device lock on a local disk that all holders may write to.",
    )
