"""Published policies as files: where they lie, and checks that they are as announced."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.clients.weights import WeightsKind, WeightsManifest
from dialoop.errors import DataLost, InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_learning.lora.adapter_config import AdapterConfig

from dialoop_services.inference.weights.adapter_files import (
    finite_tensors,
    fitting_modules,
    modules_of,
)
from dialoop_services.inference.weights.loadable import PolicyAdapter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_learning.lora.base_weights import BaseWeights


_LATEST = "latest.json"
_MAX_DIGESTS = 256  # more versions than answers under way may span


class Publications:
    """The weights root, where a trainer writes policies."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else root.resolve()

    @property
    def has_root(self) -> bool:
        """Return whether there is a weights root."""
        return self._root is not None

    def latest(self) -> WeightsManifest | None:
        """Return what latest.json names; None if there is no such file."""
        pointer = None if self._root is None else self._root / _LATEST
        if pointer is None or not pointer.is_file():
            return None
        try:
            data = json.loads(pointer.read_text("utf-8"))
            return WeightsManifest(
                policy_version=PolicyVersion(
                    lineage=str(data["lineage"]), number=int(data["number"])
                ),
                sha256=str(data["sha256"]),
                num_bytes=int(data["num_bytes"]),
                path=str(data["path"]),
                kind=WeightsKind[str(data.get("kind", "whole")).upper()],
                adapter_config_json=str(data.get("adapter_config_json", "")),
                base_digest=str(data.get("base_digest", "")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(
                f"{pointer} does not name a policy.",
                remedy="Let the trainer publish again, or delete the file to serve the base model.",
            ) from error

    def require_root(self) -> Path:
        """Return the weights root; PreconditionFailed (NO_WEIGHTS_ROOT) where there is none."""
        if self._root is None:
            raise PreconditionFailed(
                "This replica has no weights root to read a path from.",
                reason=Reason.NO_WEIGHTS_ROOT,
                remedy="Set DIALOOP_INFERENCE_WEIGHTS_ROOT, or send the weights as chunks.",
            )
        return self._root

    def file_of(self, manifest: WeightsManifest) -> Path:
        """Return the announced file, which lies under the weights root."""
        root = self.require_root()
        try:
            path = (root / manifest.path).resolve()
            is_file = path.is_relative_to(root) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # a NUL, too many characters, a loop of links
            is_file = False
        if not is_file:
            raise InvalidInput(
                "The manifest's path is not a file under the weights root.",
                reason=Reason.MANIFEST_MISMATCH,
                remedy="Give the path relative to the weights root.",
            )
        return path


async def write_chunks(path: Path, manifest: WeightsManifest, chunks: AsyncIterator[bytes]) -> None:
    """Write the chunks to a file; never more bytes than announced."""
    num_bytes = 0
    with path.open("wb") as file:
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > manifest.num_bytes:
                raise _size_mismatch(num_bytes, manifest)
            await asyncio.to_thread(file.write, chunk)


def require_intact(path: Path, manifest: WeightsManifest) -> None:
    """Refuse a file that is not, byte for byte, what was announced."""
    num_bytes = path.stat().st_size
    if num_bytes != manifest.num_bytes:
        raise _size_mismatch(num_bytes, manifest)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.sha256.lower():
        raise DataLost(
            "The weights are not those that were announced.",
            reason=Reason.CHECKSUM_MISMATCH,
            remedy="Send them again.",
        )


class BaseDigest:
    """The digest of an engine's base weights, computed once and again when their files change."""

    def __init__(self, base: BaseWeights) -> None:
        self._base = base
        self._digest: tuple[object, str] | None = None

    async def require(self, expected: str) -> None:
        """Refuse an adapter of other weights with PreconditionFailed (BASE_MISMATCH)."""
        from dialoop_learning.lora.base_weights import require_base

        state = [(file.stat().st_size, file.stat().st_mtime_ns) for file in self._base.files]
        if self._digest is None or self._digest[0] != state:
            self._digest = state, await asyncio.to_thread(self._base.digest)
        require_base(self._digest[1], expected)


class ModelDigests:
    """Digests of the models that a replica serves: of the config, and of a version's weights.

    A model of base weights is named by these; a published one by the bytes that were published; an
    adapter by its bytes and the model that it is added to.
    """

    def __init__(self, config: str = "", base: str = "") -> None:
        self._config = config
        self._base = base
        self._published: dict[tuple[str, PolicyVersion], str] = {}

    @classmethod
    async def of(cls, model_dir: Path) -> ModelDigests:
        """Read config and weights of a model directory, about a second per gigabyte."""
        from dialoop_learning.lora.base_weights import BaseWeights

        config = json.loads((model_dir / "config.json").read_text("utf-8"))
        for name in ("_name_or_path", "transformers_version"):  # say nothing about the model
            config.pop(name, None)
        base = await asyncio.to_thread(BaseWeights.of(model_dir).digest)
        return cls(json.dumps(config, sort_keys=True), base)

    def find(self, adapter: str, version: PolicyVersion) -> str:
        """Return the digest of a version, of an adapter where one is named; empty if unknown."""
        return self._published.get((adapter, version), "")

    def begin(self, version: PolicyVersion) -> None:
        """Note the version that the base weights are served as."""
        self._published["", version] = self._digest(self._base)

    def publish(self, manifest: WeightsManifest, beside: PolicyVersion) -> None:
        """Note a loaded publication; a named adapter is `beside` this version of the policy."""
        base = manifest.base_digest
        if manifest.adapter:
            base = self.find("", beside)
        key = manifest.adapter, manifest.policy_version
        self._published.pop(key, None)
        self._published[key] = self._digest(manifest.sha256.lower(), base)
        while len(self._published) > _MAX_DIGESTS:
            del self._published[next(iter(self._published))]

    def _digest(self, weights: str, base: str = "") -> str:
        if not (self._config and weights):
            return ""
        text = json.dumps([self._config, weights, base])
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def policy_adapter(path: Path, manifest: WeightsManifest, base: BaseWeights) -> PolicyAdapter:
    """Return a policy that was published as a LoRA adapter, checked before any weight is touched.

    Raises DataLost (CHECKSUM_MISMATCH), InvalidInput (INVALID_ADAPTER_CONFIG, ADAPTER_NOT_FINITE),
    PreconditionFailed (ADAPTER_MISMATCH) or Unsupported (ADAPTER_UNSUPPORTED).
    """
    require_intact(path, manifest)
    config = AdapterConfig.from_json(manifest.adapter_config_json)
    fitting_modules(path, config, modules_of(base.shapes()))
    finite_tensors(path)
    return PolicyAdapter(path=path, scaling=config.scaling)


def _size_mismatch(num_bytes: int, manifest: WeightsManifest) -> InvalidInput:
    return InvalidInput(
        f"{num_bytes} bytes came, the manifest says {manifest.num_bytes}.",
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send all chunks of the file that the manifest describes, and nothing more.",
    )
