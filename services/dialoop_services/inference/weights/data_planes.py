"""How weights get here: one interface, whichever way the publisher took.

A file under the weights root (shared memory, a shared volume), chunks of one over gRPC, or vLLM's
own transfer between GPUs, of which only the control comes through the service.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.clients.weights import Content, TransferStep, WeightsKind
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.inference.weights.loadable import Step
from dialoop_services.inference.weights.publications import spooled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.inference.weights.publications import Publications


class PlaneName(StrEnum):
    """The ways there are."""

    SHARED_MEMORY = "shared_memory"
    CHUNKS = "chunks"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Weights that are here as a file, or come device to device as `steps` say."""

    path: Path | None = None
    steps: AsyncIterator[Step] | None = None

    def require_file(self) -> Path:
        """The file, where there must be one."""
        if self.path is None:
            raise _mismatch("These weights do not come as a file.")
        return self.path


class DataPlane(Protocol):
    """A way for weights to get here."""

    name: PlaneName

    def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> Any:  # an async context manager of Arrived
        """What was announced, for as long as the engine needs it."""
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
        """The file that the manifest names; nothing may follow."""
        if await anext(contents, None) is not None:
            raise _mismatch("The manifest names a path and something came too.")
        yield Arrived(path=self._publications.file_of(manifest))


class Chunks:
    """A file in pieces."""

    name = PlaneName.CHUNKS

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """The pieces as a file of ours."""
        async with spooled(manifest, _bytes(contents)) as path:
            yield Arrived(path=path)


class Transfer:
    """VLLM's own engines."""

    def __init__(self, name: PlaneName) -> None:
        self.name = name

    @asynccontextmanager
    async def arriving(
        self, manifest: WeightsManifest, contents: AsyncIterator[Content]
    ) -> AsyncIterator[Arrived]:
        """The steps, decoded."""
        if manifest.adapter or manifest.kind is WeightsKind.ADAPTER:
            raise _mismatch(f"An adapter does not come over {self.name}.")
        yield Arrived(steps=_steps(contents))


class DataPlanes:
    """The ways this replica takes weights."""

    def __init__(self, publications: Publications, *, transfer_backend: str) -> None:
        planes: list[DataPlane] = [Chunks()]
        if publications.has_root:
            planes.insert(0, SharedMemory(publications))
        if transfer_backend:
            planes.append(Transfer(PlaneName(transfer_backend)))
        self._planes = {plane.name: plane for plane in planes}
        self._publications = publications

    @property
    def names(self) -> tuple[str, ...]:
        """What GetPolicy tells."""
        return tuple(self._planes)

    def of(self, manifest: WeightsManifest) -> DataPlane:
        """The way a manifest asks for; PreconditionFailed when this replica does not take it."""
        default = PlaneName.SHARED_MEMORY if manifest.path else PlaneName.CHUNKS
        name = manifest.data_plane or default
        if name == PlaneName.SHARED_MEMORY and PlaneName.SHARED_MEMORY not in self._planes:
            self._publications.file_of(manifest)  # says what is missing
        if name not in self._planes:
            raise PreconditionFailed(
                f"This replica takes no weights over {name}; it takes {', '.join(self._planes)}.",
                reason=Reason.DATA_PLANE_UNAVAILABLE,
                remedy="nccl and ipc need vLLM on a CUDA device and DIALOOP_INFERENCE_"
                "DATA_PLANE; or publish over another data plane.",
            )
        return self._planes[PlaneName(name)]


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
        except ValueError:
            raise _mismatch(f"The info of step {content.phase.name} is no JSON.") from None
        yield Step(phase=content.phase, info=info)


def _mismatch(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send a manifest, then what its data plane needs and nothing else.",
    )
