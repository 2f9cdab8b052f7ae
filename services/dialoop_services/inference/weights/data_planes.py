"""The data planes, over which weights come to a replica: one interface for all.

A file under the weights root (shared memory, a shared volume), chunks of a file over gRPC, a file
that a data plane of the user's own brings, or vLLM's own transfer between GPUs, whose control
messages alone come through the service.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.clients.weights import Content, TransferPhase, TransferStep, WeightsKind
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.config.tables import DEVICE_PLANES
from dialoop_services.inference.weights.loadable import Step
from dialoop_services.inference.weights.publications import Publications, write_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.config.own_data_plane import OwnDataPlane


_SHARED_MEMORY, _CHUNKS = "shared_memory", "chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Weights as a file, or as the steps of a transfer from device to device."""

    path: Path | None = None
    steps: AsyncIterator[Step] | None = None

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
    ) -> None:
        shared = _SHARED_MEMORY if publications.has_root else ""
        names = (shared, _CHUNKS, transfer_backend, own.name if own else "")
        self.names = tuple(name for name in names if name)
        """The names of the planes, as GetPolicy lists them."""
        self._publications = publications
        self._own = own

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield what was announced, for as long as the engine needs it.

        Raise PreconditionFailed (DATA_PLANE_UNAVAILABLE, NO_WEIGHTS_ROOT) where this replica has no
        such plane, and InvalidInput (MANIFEST_MISMATCH) where something else comes than announced.
        """
        name = self._name_in(manifest)
        if name in DEVICE_PLANES:
            if manifest.adapter or manifest.kind is WeightsKind.ADAPTER:
                raise _mismatch(f"An adapter cannot come over {name}.")
            yield Arrived(steps=_steps(contents))
            return
        if name != _CHUNKS and await anext(contents, None) is not None:
            raise _mismatch("The manifest names a path or address, and something followed it.")
        if name == _SHARED_MEMORY:
            yield Arrived(path=self._publications.file_of(manifest))
            return
        with tempfile.TemporaryDirectory(prefix="dialoop-weights-") as folder:
            path = Path(folder) / "model.safetensors"
            if name == _CHUNKS:
                await write_chunks(path, manifest, _bytes(contents))
            elif self._own is not None:
                await self._own.get(manifest.path, path)
            yield Arrived(path=path)

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
