"""Ways to send a policy's bytes to a replica: one interface, five implementations.

| name | way | where |
|---|---|---|
| shared_memory | a safetensors file that the replica opens | one host, or a shared volume |
| chunks | the file's bytes over gRPC | any two hosts |
| module:Class | a class of the user's own moves the file | `config.own_data_plane` |
| nccl, ipc | vLLM's own weight transfer, between GPUs | CUDA, see `vllm_transfer` |

The trainer keeps each file under `policies/`, for export and re-scoring, and is done with a publish
only when it lies there. A file in memory is written and sent first. The first three ways also send
a LoRA adapter alone, or only what changed since the policy before: a delta, for replicas that have
that policy. Others refuse it, and get the whole.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dialoop.clients.weights import WeightsKind
from dialoop.errors import DataLost, InternalError, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.rl.staleness import publish_order, version_of_name

from dialoop_services.runtime.durable import write_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from dialoop.clients.inference import InferenceClient, WeightsManifest
    from dialoop.sequences import PolicyVersion

    from dialoop_services.config.own_data_plane import OwnDataPlane
    from dialoop_services.trainer.learner.learner_state import ExportedWeights

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
# The newest policy, and the one before it, which a replica may still read.
_KEPT_IN_MEMORY = 2
_DELTA_REFUSED = (DataLost, InternalError, InvalidInput, PreconditionFailed)
"""What a replica answers to a delta that may yet take the whole: it lacks the base, other bytes
came, its disk is full, or it does not know deltas."""
_REFUSED_TOO = frozenset(
    {Reason.VERSION_NOT_NEWER, Reason.UNKNOWN_PARAMETERS, Reason.TOKENIZER_MISMATCH}
)
"""Reasons for which the whole would be refused, too."""


class WeightsSender:
    """Sends weights to replicas: a manifest that says where they lie, or the bytes with it."""

    name: str
    is_fetched = False
    """Whether a replica that missed a publish can fetch it by itself."""
    sends_deltas = False
    """Whether replicas that have the policy before get only what changed."""

    def first_place(self, version: PolicyVersion, name: str) -> Path | None:
        """Return where the file of that name is written before it is kept; None: where it stays."""
        return None

    async def offer(self, manifest: WeightsManifest, weights: ExportedWeights) -> None:
        """Prepare a publish once, before replicas are called to load it."""

    async def located(self, manifest: WeightsManifest, path: Path) -> WeightsManifest:
        """Return the manifest with the place where a replica finds the file `path`."""
        return manifest

    def contents(self, path: Path) -> AsyncIterator[bytes] | Iterable[bytes]:
        """Return the bytes of the file that go with the manifest."""
        return ()

    async def send(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        *,
        deadline_s: float,
    ) -> None:
        """Make the replica load the weights, by their delta if it takes that; else the whole.

        Raise the errors of LoadWeights.
        """
        if weights.delta is not None:
            changes = replace(
                manifest,
                kind=WeightsKind.DELTA,
                sha256=weights.delta.sha256,
                num_bytes=weights.delta.num_bytes,
                base_digest=weights.delta.base,
            )
            try:
                await self._send(replica, changes, weights.delta.path, deadline_s)
                return
            except _DELTA_REFUSED as error:
                if error.reason in _REFUSED_TOO:
                    raise
                log.info("A replica gets the whole policy.", extra={"reason": error.reason})
        await self._send(replica, manifest, weights.first or weights.path, deadline_s)

    async def _send(
        self, replica: InferenceClient, manifest: WeightsManifest, path: Path, deadline_s: float
    ) -> None:
        located = await self.located(manifest, path)
        await replica.load_weights(located, self.contents(path), deadline_s=deadline_s)


class FileSender(WeightsSender):
    """Sends the path of a file that the replica opens: under `policies/`, or in memory."""

    name = "shared_memory"
    is_fetched = True

    def __init__(self, policies: Path, memory: Path | None, *, sends_deltas: bool) -> None:
        self._root = memory or policies
        self._is_in_memory = memory is not None
        self.sends_deltas = sends_deltas

    def first_place(self, version: PolicyVersion, name: str) -> Path | None:
        """Return the file's place in memory, if there is one."""
        return self._root / str(version) / name if self._is_in_memory else None

    async def offer(self, manifest: WeightsManifest, weights: ExportedWeights) -> None:
        """Name a file in memory in latest.json for replicas that start later; delete old ones."""
        if self._is_in_memory:
            await asyncio.to_thread(self._point_to, manifest, weights)

    async def located(self, manifest: WeightsManifest, path: Path) -> WeightsManifest:
        """Return the manifest with the path of the file."""
        return replace(manifest, path=_name_of(manifest, path))

    def _point_to(self, manifest: WeightsManifest, weights: ExportedWeights) -> None:
        version = manifest.policy_version
        pointer = pointer_of(version, _name_of(manifest, weights.path), weights)
        write_json(self._root / "latest.json", pointer)
        policies = [path for path in self._root.iterdir() if path.is_dir()]
        policies.sort(key=lambda path: publish_order(version_of_name(path.name)), reverse=True)
        for old in policies[_KEPT_IN_MEMORY:]:
            shutil.rmtree(old, ignore_errors=True)


class ChunkSender(WeightsSender):
    """Sends the file's bytes over gRPC, in chunks of 1 MiB; the replica checks the digest."""

    name = "chunks"

    def __init__(self, *, sends_deltas: bool) -> None:
        self.sends_deltas = sends_deltas

    async def contents(self, path: Path) -> AsyncIterator[bytes]:
        """Yield the file's bytes."""
        with path.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk


class OwnSender(WeightsSender):
    """Puts each file on a data plane of the user's own, and sends the address.

    The replica gets the file from there and checks the digest. The whole is put there once a
    replica needs it.
    """

    def __init__(self, own: OwnDataPlane, *, sends_deltas: bool) -> None:
        self.name = own.name
        self.sends_deltas = sends_deltas
        self._own = own
        self._putting = asyncio.Lock()  # once for all replicas
        self._addresses: dict[Path, str] = {}

    async def offer(self, manifest: WeightsManifest, weights: ExportedWeights) -> None:
        """Put what replicas get first there."""
        self._addresses.clear()
        await self.located(manifest, weights.path if weights.delta is None else weights.delta.path)

    async def located(self, manifest: WeightsManifest, path: Path) -> WeightsManifest:
        """Return the manifest with the address, once the file is there."""
        async with self._putting:
            if path not in self._addresses:
                self._addresses[path] = await self._own.put(path, _name_of(manifest, path))
        return replace(manifest, data_plane=self.name, path=self._addresses[path])


def pointer_of(version: PolicyVersion, path: str, weights: ExportedWeights) -> dict[str, Any]:
    """Return the content of latest.json: the newest policy, for replicas that start later."""
    pointer: dict[str, Any] = {
        "lineage": version.lineage,
        "number": version.number,
        "path": path,
        "sha256": weights.sha256,
        "num_bytes": weights.num_bytes,
    }
    if weights.kind is WeightsKind.WHOLE:
        return pointer
    return {
        **pointer,
        "kind": weights.kind.name.lower(),
        "adapter_config_json": weights.adapter_config_json,
        "base_digest": weights.base_digest,
    }


def _name_of(manifest: WeightsManifest, path: Path) -> str:
    return f"{manifest.policy_version}/{path.name}"
