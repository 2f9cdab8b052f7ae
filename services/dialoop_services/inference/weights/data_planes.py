"""The data planes, over which weights come to a replica: one interface for all.

A file under the weights root (shared memory, a shared volume), chunks of a file over gRPC, a file
that a data plane of the user's own brings, or vLLM's own transfer between GPUs, whose control
messages alone come through the service. A file of changes (a delta) becomes the whole policy here.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.clients.weights import Content, TransferPhase, TransferStep, WeightsKind
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.config.tables import DEVICE_PLANES
from dialoop_services.inference.weights.kept import KeptPolicy, WeightsFolder
from dialoop_services.inference.weights.loadable import Step
from dialoop_services.inference.weights.publications import (
    Publications,
    require_intact,
    write_chunks,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.config.own_data_plane import OwnDataPlane


_SHARED_MEMORY, _CHUNKS = "shared_memory", "chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Weights as a file, or as the steps of a transfer from device to device.

    manifest: of what the engine is to load. is_proved: whether the file is known to be it.
    """

    manifest: WeightsManifest
    path: Path | None = None
    steps: AsyncIterator[Step] | None = None
    is_proved: bool = False

    def require_file(self) -> Path:
        """Return the file; InvalidInput (MANIFEST_MISMATCH) if the weights are not one."""
        if self.path is None:
            raise _mismatch("These weights do not come as a file.")
        return self.path


class DataPlanes:
    """The data planes that this replica has."""

    def __init__(
        self,
        publications: Publications,
        *,
        transfer_backend: str,
        own: OwnDataPlane | None = None,
        takes_deltas: bool = True,
    ) -> None:
        shared = _SHARED_MEMORY if publications.has_root else ""
        names = (shared, _CHUNKS, transfer_backend, own.name if own else "")
        self.names = tuple(name for name in names if name)
        """The names of the planes, as GetPolicy lists them."""
        self._publications = publications
        self._own = own
        self._takes_deltas = takes_deltas
        self._kept = KeptPolicy()

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield what was announced, for as long as the engine needs it.

        Raise PreconditionFailed (DATA_PLANE_UNAVAILABLE, NO_WEIGHTS_ROOT) where this replica has no
        such plane or not the policy that a delta changes (DELTA_BASE_MISSING), and InvalidInput
        (MANIFEST_MISMATCH) where something else comes than announced.
        """
        name = self._name_in(manifest)
        if name in DEVICE_PLANES:
            if not _is_policy(manifest):
                raise _mismatch(f"An adapter cannot come over {name}.")
            yield Arrived(manifest=manifest, steps=_steps(contents))
            return
        if manifest.kind is WeightsKind.DELTA:
            self._kept.require(manifest.base_digest)  # before a byte of it comes
        elif _is_policy(manifest):
            async with self._kept.lock:
                self._kept.forget()  # so that there are never two of them on the disk
        if name != _CHUNKS and await anext(contents, None) is not None:
            raise _mismatch("The manifest names a path or address, and something followed it.")
        async with self._file(name, manifest, contents) as arrived:
            yield arrived

    @asynccontextmanager
    async def _file(
        self, name: str, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield the announced file, and keep that of a policy to apply deltas to it."""
        folder = None if name == _SHARED_MEMORY else WeightsFolder()
        try:
            path = self._publications.file_of(manifest) if folder is None else folder.path
            if name == _CHUNKS:
                await write_chunks(path, manifest, _bytes(contents))
            elif folder is not None and self._own is not None:
                await self._own.get(manifest.path, path)
            if manifest.kind is WeightsKind.DELTA:
                await asyncio.to_thread(require_intact, path, manifest)
                async with self._kept.lock:
                    yield await self._changed(path, manifest)
                return
            yield Arrived(manifest=manifest, path=path)
            if _is_policy(manifest) and self._takes_deltas:
                async with self._kept.lock:
                    self._kept.take(manifest.sha256, path, folder)
                folder = None
        finally:
            if folder is not None:
                folder.delete()

    async def _changed(self, delta: Path, manifest: WeightsManifest) -> Arrived:
        """Return the whole policy that an intact delta leads to."""
        path, sha256, num_bytes = await self._kept.change(delta, manifest)
        whole = replace(
            manifest, kind=WeightsKind.WHOLE, sha256=sha256, num_bytes=num_bytes, base_digest=""
        )
        return Arrived(manifest=whole, path=path, is_proved=True)

    def _name_in(self, manifest: WeightsManifest) -> str:
        """Return the plane that a manifest names; PreconditionFailed if there is none here."""
        name = manifest.data_plane or (_SHARED_MEMORY if manifest.path else _CHUNKS)
        if name == _SHARED_MEMORY:
            self._publications.require_root()
        if name not in self.names:
            raise PreconditionFailed(
                f"This replica takes no weights over {name}; it takes {', '.join(self.names)}.",
                reason=Reason.DATA_PLANE_UNAVAILABLE,
                remedy="nccl and ipc need vLLM on a CUDA device and DIALOOP_INFERENCE_"
                "DATA_PLANE, and a data plane of your own needs that variable or the job file; or "
                "publish over another data plane.",
            )
        return name


def _is_policy(manifest: WeightsManifest) -> bool:
    return not manifest.adapter and manifest.kind is not WeightsKind.ADAPTER


async def _bytes(contents: AsyncIterator[Content]) -> AsyncIterator[bytes]:
    async for content in contents:
        if not isinstance(content, bytes):
            raise _mismatch("Something other than a chunk followed the manifest.")
        yield content


async def _steps(contents: AsyncIterator[Content]) -> AsyncIterator[Step]:
    async for content in contents:
        if not isinstance(content, TransferStep):
            raise _mismatch("Something other than a transfer step followed the manifest.")
        try:
            info = json.loads(content.info_json or "{}")
        except (ValueError, RecursionError):
            raise _mismatch(f"The info of step {content.phase.name} is not JSON.") from None
        # At FINISH the engine takes what it has got, so that no cut may come after it.
        if content.phase is TransferPhase.FINISH and await anext(contents, None) is not None:
            raise _mismatch("Something followed the step FINISH.")
        yield Step(phase=content.phase, info=info, tensors=content.tensors)


def _mismatch(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send a manifest, then what its data plane needs and nothing else.",
    )
