"""One replica: an engine, whether it may take traffic, and the policies it loads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import DataLost, InvalidInput, PreconditionFailed, Unavailable
from dialoop.sequences import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dialoop.trajectory import SamplingParams

    from services.inference.engine import (
        Engine,
        LoadTimes,
        OnTokens,
        Sampled,
        Scored,
        StopTokens,
    )

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a publish announces; `path` is relative to the weights root, empty for chunks."""

    policy_version: PolicyVersion
    sha256: str
    num_bytes: int
    path: str = ""


class Replica:
    """Owns the engine. After a failed load it takes no traffic until a load succeeds."""

    def __init__(
        self,
        engine: Engine,
        *,
        weights_root: Path | None,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._root = None if weights_root is None else weights_root.resolve()
        self._report = report
        self._loading = asyncio.Lock()
        self._fault = ""
        self.num_sampled_tokens = 0
        self.num_requests_running = 0

    @property
    def engine(self) -> Engine:
        """The engine, for what it says of itself."""
        return self._engine

    @property
    def fault(self) -> str:
        """Why there is no traffic, or empty: WEIGHTS_BAD, NOT_READY."""
        return self._fault or ("" if self._engine.is_alive else "NOT_READY")

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> tuple[Sampled, ...]:
        """Sample; Unavailable while the replica is out of rotation."""
        self._require_ready()
        self.num_requests_running += 1
        try:
            sampled = await self._engine.sample(
                prompt_ids, sampling, stop=stop, num_samples=num_samples, on_tokens=on_tokens
            )
        finally:
            self.num_requests_running -= 1
        self.num_sampled_tokens += sum(len(one.token_ids) for one in sampled)
        return sampled

    async def logprobs(self, rows: Sequence[Sequence[int]]) -> tuple[Scored, ...]:
        """Score rows under one policy version: rows that a load parted are scored again."""
        self._require_ready()
        while True:
            scored = await asyncio.gather(*(self._engine.logprobs(row) for row in rows))
            if len({one.policy_version for one in scored}) <= 1:
                return tuple(scored)

    async def load(self, manifest: Manifest, data: bytes | None = None) -> LoadTimes:
        """Check the announced bytes, then make them the policy; one load at a time."""
        async with self._loading:
            self._require_newer(manifest.policy_version)
            if data is not None:
                _require_intact(data, manifest)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "model.safetensors"
                    await asyncio.to_thread(path.write_bytes, data)
                    return await self._load(path, manifest.policy_version)
            path = self._published(manifest.path)
            content = await asyncio.to_thread(_read, path)
            _require_intact(content, manifest)
            return await self._load(path, manifest.policy_version)

    async def load_latest(self) -> None:
        """Load what latest.json of the weights root names, if there is one."""
        pointer = None if self._root is None else self._root / "latest.json"
        if pointer is None or not pointer.is_file():
            return
        data = json.loads(await asyncio.to_thread(pointer.read_text, "utf-8"))
        version = PolicyVersion(lineage=data.pop("lineage"), number=data.pop("number"))
        await self.load(Manifest(policy_version=version, **data))

    async def pause(self) -> None:
        """Hold generation; requests keep their place."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()

    async def _load(self, path: Path, version: PolicyVersion) -> LoadTimes:
        try:
            times = await self._engine.load_weights(path, version)
        except PreconditionFailed:
            raise  # refused before anything was touched: the old policy is whole
        except BaseException:
            await self._leave_rotation("WEIGHTS_BAD")
            raise
        self._fault = ""
        await self._report(True)
        log.info("Policy loaded.", extra={"policy": str(version), "pause_s": times.pause_s})
        return times

    async def _leave_rotation(self, fault: str) -> None:
        self._fault = fault
        await self._report(False)
        log.error("Out of rotation until a load succeeds.", extra={"reason": fault})

    def _require_ready(self) -> None:
        if self.fault:
            raise Unavailable(
                "This replica takes no traffic.",
                reason=self.fault,
                remedy="Try another replica, or wait for the next publish.",
            )

    def _require_newer(self, version: PolicyVersion) -> None:
        current = self._engine.policy_version
        same_lineage = current.lineage == version.lineage
        if same_lineage and version.number <= current.number and not self._fault:
            raise PreconditionFailed(
                f"Policy {version} is not newer than {current}, which is loaded.",
                reason="VERSION_NOT_NEWER",
                remedy="Publish with a higher number, or in a new lineage.",
            )

    def _published(self, relative: str) -> Path:
        """A file under the weights root; nothing outside it can be named."""
        if self._root is None:
            raise PreconditionFailed(
                "This replica has no weights root to read a path from.",
                reason="NO_WEIGHTS_ROOT",
                remedy="Set DIALOOP_INFERENCE_WEIGHTS_ROOT, or send the weights as chunks.",
            )
        path = (self._root / relative).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            raise InvalidInput(
                "The manifest's path is no file under the weights root.",
                reason="MANIFEST_MISMATCH",
                remedy="Give the path relative to the weights root.",
            )
        return path


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _require_intact(data: bytes, manifest: Manifest) -> None:
    if len(data) != manifest.num_bytes:
        raise InvalidInput(
            f"{len(data)} bytes came, the manifest says {manifest.num_bytes}.",
            reason="MANIFEST_MISMATCH",
            remedy="Send all chunks of the file that the manifest describes.",
        )
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise DataLost(
            "The weights are not those that were announced.",
            reason="CHECKSUM_MISMATCH",
            remedy="Send them again.",
        )
