"""The file of the newest policy, to which a replica applies the changes of the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import DataLost, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.model.weight_delta import apply_delta
from dialoop_learning.model.weight_files import read_header

from dialoop_services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from dialoop.clients.weights import WeightsManifest

_PREFIX, _NEW, _LOCK, _FILE = "dialoop-policy-", "dialoop-new-", "held", "model.safetensors"


class WeightsFolder:
    """A folder of this process for a file of weights, which is deleted at the latest when it ends.

    A process that is killed deletes nothing, so each new folder deletes those whose owner is gone.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        for left in place.glob(f"{_PREFIX}*"):
            if (left / _LOCK).is_file() and os.access(left / _LOCK, os.W_OK):
                _delete_if_left(left)
        made = Path(tempfile.mkdtemp(prefix=_NEW))
        self._lock = DeviceLock(made / _LOCK)
        self._lock.try_own()
        folder = made.rename(place / made.name.replace(_NEW, _PREFIX))
        self.path = folder / _FILE
        self._end = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def delete(self) -> None:
        """Delete the folder."""
        self._end()
        self._lock.release()


class KeptPolicy:
    """Where the newest policy's file lies, and its digest; nothing where there is none.

    `lock` is held by whoever changes the file, until the engine has loaded it.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._digest = ""
        self._path: Path | None = None
        self._folder: WeightsFolder | None = None

    def forget(self) -> None:
        """Have none, and delete the file if it is this replica's own."""
        if self._folder is not None:
            self._folder.delete()
        self._digest, self._path, self._folder = "", None, None

    def take(self, digest: str, path: Path, folder: WeightsFolder | None) -> None:
        """Keep a file that has been proved: in a folder of its own, or where the trainer has it."""
        self.forget()
        self._digest, self._path, self._folder = digest.lower(), path, folder

    def require(self, base_digest: str) -> None:
        """Refuse changes to another policy with PreconditionFailed (DELTA_BASE_MISSING)."""
        if not base_digest or self._digest != base_digest.lower():
            raise PreconditionFailed(
                "This replica does not have the policy that the delta changes.",
                reason=Reason.DELTA_BASE_MISSING,
                remedy="Send the whole policy.",
            )

    async def change(self, delta: Path, manifest: WeightsManifest) -> tuple[Path, str, int]:
        """Apply an intact delta; return the whole's file, digest and size, proved.

        Raise DataLost (CHECKSUM_MISMATCH) or InvalidInput (MANIFEST_MISMATCH) where something else
        results, and keep nothing then: only the whole helps.
        """
        self.require(manifest.base_digest)
        facts = read_header(delta).metadata
        try:
            digest, num_bytes = facts["sha256"].lower(), int(facts["num_bytes"])
        except (KeyError, ValueError, AttributeError) as error:
            raise InvalidInput(
                "The delta does not say what results from it.",
                reason=Reason.MANIFEST_MISMATCH,
                remedy="Send the whole policy.",
            ) from error
        try:
            path = await asyncio.to_thread(self._own)
            self._digest = ""  # it is neither of the two until it is proved
            if await asyncio.to_thread(apply_delta, delta, path) != digest:
                raise DataLost(
                    "The weights that result from the delta are not those that were announced.",
                    reason=Reason.CHECKSUM_MISMATCH,
                    remedy="Send the whole policy.",
                )
        except BaseException:
            self.forget()
            raise
        self._digest = digest
        return path, digest, num_bytes

    def _own(self) -> Path:
        """Return the file, copied where it is not this replica's own."""
        if self._folder is None:
            theirs, self._folder = self._path, WeightsFolder()
            self._path = self._folder.path
            if theirs is not None:
                shutil.copyfile(theirs, self._path)
        return self._folder.path


def _delete_if_left(folder: Path) -> None:
    lock = DeviceLock(folder / _LOCK)
    if lock.try_own():
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
