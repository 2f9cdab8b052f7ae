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
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.clients.weights import Content, TransferPhase, TransferStep, WeightsKind
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.inference.weights.loadable import Step
from dialoop_services.inference.weights.publications import spool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.config.own_data_plane import OwnDataPlane
    from dialoop_services.inference.weights.publications import Publications


class PlaneName(StrEnum):
    """The names of the data planes."""

    SHARED_MEMORY = "shared_memory"
    CHUNKS = "chunks"
    NCCL = "nccl"
    IPC = "ipc"


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


class DataPlane(Protocol):
    """One way for weights to come to a replica."""

    @property
    def name(self) -> str:
        """Return the name, as manifests and GetPolicy give it."""
        ...

    def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> Any:  # an async context manager of Arrived
        """Yield what was announced, for as long as the engine needs it."""
        ...


class SharedMemory:
    """A file under the weights root."""

    name = PlaneName.SHARED_MEMORY

    def __init__(self, publications: Publications) -> None:
        self._publications = publications

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield the file that the manifest names; nothing may follow the manifest."""
        if await anext(contents, None) is not None:
            raise _mismatch("The manifest names a path, and something followed it.")
        yield Arrived(path=self._publications.file_of(manifest))


class Chunks:
    """A file in chunks, over gRPC."""

    name = PlaneName.CHUNKS

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield the chunks as a temporary file."""
        async with spool(manifest, _bytes(contents)) as path:
            yield Arrived(path=path)


class OwnPlane:
    """A file that a data plane of the user's own brings from the address in the manifest."""

    def __init__(self, own: OwnDataPlane) -> None:
        self.name = own.name
        self._own = own

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield the file, which is deleted afterwards."""
        if await anext(contents, None) is not None:
            raise _mismatch("The manifest names an address, and something followed it.")
        with tempfile.TemporaryDirectory(prefix="dialoop-weights-") as folder:
            path = Path(folder) / "model.safetensors"
            await self._own.get(manifest.path, path)
            yield Arrived(path=path)


class Transfer:
    """A device-to-device transfer by the engine's own backend."""

    def __init__(self, name: PlaneName) -> None:
        self.name = name

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """Yield the decoded steps."""
        if manifest.adapter or manifest.kind is WeightsKind.ADAPTER:
            raise _mismatch(f"An adapter cannot come over {self.name}.")
        yield Arrived(steps=_steps(contents))


class DataPlanes:
    """The data planes that this replica has."""

    def __init__(
        self,
        publications: Publications,
        *,
        transfer_backend: str,
        own: OwnDataPlane | None = None,
    ) -> None:
        planes: list[DataPlane] = [Chunks()]
        if publications.has_root:
            planes.insert(0, SharedMemory(publications))
        if transfer_backend:
            planes.append(Transfer(PlaneName(transfer_backend)))
        if own is not None:
            planes.append(OwnPlane(own))
        self._planes = {plane.name: plane for plane in planes}
        self._publications = publications

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the planes, as GetPolicy lists them."""
        return tuple(self._planes)

    def of(self, manifest: WeightsManifest) -> DataPlane:
        """Return the plane that a manifest names; PreconditionFailed if there is none here."""
        default = PlaneName.SHARED_MEMORY if manifest.path else PlaneName.CHUNKS
        name = manifest.data_plane or default
        if name == PlaneName.SHARED_MEMORY and PlaneName.SHARED_MEMORY not in self._planes:
            self._publications.file_of(manifest)  # raises the error that names what is missing
        if name not in self._planes:
            raise PreconditionFailed(
                f"This replica takes no weights over {name}; it takes {', '.join(self._planes)}.",
                reason=Reason.DATA_PLANE_UNAVAILABLE,
                remedy="nccl and ipc need vLLM on a CUDA device and DIALOOP_INFERENCE_"
                "DATA_PLANE, and a data plane of your own needs that variable or the job file; or "
                "publish over another data plane.",
            )
        return self._planes[name]


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
