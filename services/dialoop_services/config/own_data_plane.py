"""A data plane of the user's own: how the file of a published policy comes from trainer to replica.

class Bucket:                                             # data_plane = "my_plane:Bucket"
    def put(self, path: Path, name: str) -> str: ...      # trainer: upload; return the address
    def get(self, address: str, path: Path) -> None: ...  # replica: download to `path`
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dialoop.errors import InvalidConfig, Unavailable
from dialoop.failures import log_failure
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.user_functions import call, call_now, raised_at

from dialoop_services.config.tables import DATA_PLANES


class FilePlane(Protocol):
    """Moves files. Trainer and replicas each make one without arguments; methods may be async."""

    def put(self, path: Path, name: str) -> Any:
        """Make the file reachable for replicas, and return where, as text.

        `name` is another one for each policy, as "main-7/model.safetensors". The file may be
        deleted afterwards.
        """

    def get(self, address: str, path: Path) -> Any:
        """Write the file that `put` returned `address` for to `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDataPlane:
    """A FilePlane and the import path that named it, which manifests and errors quote."""

    name: str
    plane: FilePlane

    async def put(self, path: Path, name: str) -> str:
        """Return what the plane's `put` returns; raise Unavailable (DATA_PLANE_FAILED)."""
        address = await self._call("put", path, name)
        if not isinstance(address, str) or not address:
            raise self._error("put", f"returned {address!r}, which is no address")
        return address

    async def get(self, address: str, path: Path) -> None:
        """Call the plane's `get`; raise Unavailable (DATA_PLANE_FAILED) where no file comes."""
        await self._call("get", address, path)
        if not await asyncio.to_thread(path.is_file):
            raise self._error("get", "wrote no file")

    async def _call(self, method: str, first: Any, second: Any) -> Any:
        try:
            return await call(getattr(self.plane, method), first, second)
        except Exception as error:
            error_id = log_failure(error, f"The data plane {self.name}: {method}")
            how = f"raised {raised_at(error)} (error_id {error_id})"
            raise self._error(method, how) from error

    def _error(self, method: str, how: str) -> Unavailable:
        return Unavailable(
            f"The data plane {self.name}: {method} {how}.",
            reason=Reason.DATA_PLANE_FAILED,
            remedy=f"Correct {method}; the log of the process that called it says more.",
        )


def load_data_plane(name: str) -> OwnDataPlane | None:
    """Make the data plane of that import path; None for a built-in one.

    Raise InvalidConfig (DATA_PLANE_NOT_FOUND) for what is none.
    """
    if name in DATA_PLANES:
        return None
    reason = Reason.DATA_PLANE_NOT_FOUND
    make = load_attribute(name, what="data plane", reason=reason, built_in=DATA_PLANES)
    try:
        plane = call_now(make)
    except Exception as error:
        raise InvalidConfig(
            f"The data plane {name} cannot be made: {type(error).__name__}: {error}.",
            reason=reason,
            remedy="Name a class that is made without arguments, and correct what it says.",
        ) from error
    missing = [
        f"{method}({', '.join(names)})"
        for method, names in (("put", ("path", "name")), ("get", ("address", "path")))
        if not _takes_two(getattr(plane, method, None))
    ]
    if missing:
        raise InvalidConfig(
            f"The data plane {name} has no {' and no '.join(missing)}.",
            reason=reason,
            remedy="See FilePlane in dialoop_services.config.own_data_plane.",
        )
    return OwnDataPlane(name=name, plane=plane)


def _takes_two(method: Any) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True
