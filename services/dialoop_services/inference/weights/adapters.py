"""The LoRA adapters of a replica: loaded beside the policy, tested, swapped and unloaded.

A swap gives the adapter a new slot, for which no engine has cached keys. Samples under way end with
the adapter they began with, new ones use the new one, so each sample has one version. Adapters
belong to the weights they were loaded on: new weights end them, and the samples under way with
them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from dialoop.errors import (
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from dialoop.reasons import Reason
from dialoop_learning.lora.adapter_config import AdapterConfig

from dialoop_services.inference.engine import LoadTimes, SupportsAdapters, VersionSpan
from dialoop_services.inference.weights.adapter_files import (
    is_visible,
    require_fitting,
    write_folder,
)
from dialoop_services.inference.weights.loadable import Adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dialoop.clients.weights import WeightsManifest
    from dialoop.sequences import Floats, PolicyVersion

    from dialoop_services.inference.engine import Engine, OnTokens, Sampled, Scored

    T = TypeVar("T")
    Sampling = Callable[
        ["Adapter | None", OnTokens | None], Coroutine[Any, Any, tuple[Sampled, ...]]
    ]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PROBE_TOKENS = 48
_MAX_DIFFERENCE = 1e-3


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An adapter and the samples under way with it; `is_lost` once new weights ended it."""

    engine: SupportsAdapters
    adapter: Adapter
    users: set[asyncio.Task[Any]] = field(default_factory=set)
    is_lost: bool = False
    is_retired: bool = False


class Adapters:
    """Owns the loaded adapters. The replica calls `load`, `unload` and `clear` one at a time.

    An engine without SupportsAdapters holds none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: dict[str, _Entry] = {}
        self._slots = itertools.count(1)
        self._root: Path | None = None
        # A removal starts when the last user of a retired adapter ends, and takes itself out.
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """Return the versions of the loaded adapters by name."""
        return {name: entry.adapter.policy_version for name, entry in self._entries.items()}

    def require(self, name: str) -> None:
        """Raise NotFound (ADAPTER_NOT_FOUND) for an unknown name. Empty is the policy."""
        if name and name not in self._entries:
            raise _unknown_error(name, self._entries)

    def require_room(self, manifest: WeightsManifest) -> tuple[SupportsAdapters, AdapterConfig]:
        """Return the engine and the adapter's config; refuse what can never be loaded here."""
        name, engine = manifest.adapter, self._engine
        if not isinstance(engine, SupportsAdapters) or not engine.adapter_space.limits.max_adapters:
            raise PreconditionFailed(
                "This replica has no room for adapters, which would halve its throughput.",
                reason=Reason.ADAPTERS_DISABLED,
                remedy="Start it with DIALOOP_INFERENCE_MAX_ADAPTERS=1 or more.",
            )
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"{name!r} cannot be the name of an adapter.",
                reason=Reason.INVALID_ADAPTER_NAME,
                remedy="Use up to 64 letters, digits, dots, dashes and underscores.",
            )
        most = engine.adapter_space.limits.max_adapters
        if name not in self._entries and len(self._entries) >= most:
            raise CapacityExhausted(
                f"{len(self._entries)} adapters are loaded, which is all this replica holds.",
                reason=Reason.TOO_MANY_ADAPTERS,
                remedy="Unload one, or raise DIALOOP_INFERENCE_MAX_ADAPTERS.",
            )
        self._require_newer(name, manifest.policy_version)
        return engine, AdapterConfig.from_json(manifest.adapter_config_json)

    async def load(self, path: Path, manifest: WeightsManifest) -> LoadTimes:
        """Load or swap an adapter; if that fails, the adapter that had the name stays."""
        begun = time.monotonic()
        engine, config = self.require_room(manifest)
        modules = require_fitting(path, config, engine.adapter_space)
        visible = await asyncio.to_thread(is_visible, path, config)
        slot = next(self._slots)
        adapter = Adapter(
            name=manifest.adapter,
            policy_version=manifest.policy_version,
            slot=slot,
            folder=self._folder() / str(slot),
        )
        await asyncio.to_thread(write_folder, adapter.folder, path, config, modules)
        try:
            await engine.add_adapter(adapter)
            await self._prove(engine, adapter, manifest, must_show=visible)
        except BaseException:
            await self._remove(engine, adapter)
            raise
        before = self._entries.get(adapter.name)
        self._entries[adapter.name] = _Entry(engine=engine, adapter=adapter)
        if before is not None:
            await self._retire(before)
        return LoadTimes(pause_s=0.0, load_s=time.monotonic() - begun)

    async def unload(self, name: str) -> bool:
        """Unload an adapter; samples under way with it still end. False when there is none."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        await self._retire(entry)
        return True

    async def clear(self) -> None:
        """End all adapters, and all samples under way with one, before new weights are loaded."""
        entries = list(self._entries.values())
        self._entries.clear()
        for entry in entries:
            entry.is_lost = True
            users = list(entry.users)
            for user in users:
                user.cancel()
            if users:
                await asyncio.wait(users)
            await self._retire(entry)
        if self._removals:
            await asyncio.wait(self._removals)

    async def sample(
        self, name: str, call: Sampling, *, on_tokens: OnTokens | None
    ) -> tuple[Sampled, ...]:
        """Sample by `call` with the named adapter, if any; label tokens with its version."""
        if not name:
            return await call(None, on_tokens)

        async def call_adapted(entry: _Entry) -> tuple[Sampled, ...]:
            version = entry.adapter.policy_version
            tell = on_tokens and (lambda chunk: on_tokens(replace(chunk, policy_version=version)))
            samples = await call(entry.adapter, tell)
            return tuple(_label(sampled, version) for sampled in samples)

        return await self._use(name, call_adapted)

    async def logprobs(self, name: str, rows: Sequence[Sequence[int]]) -> list[Scored]:
        """Score rows with the named adapter, empty for none."""
        if not name:
            return await asyncio.gather(*(self._engine.logprobs(row) for row in rows))

        async def call_adapted(entry: _Entry) -> list[Scored]:
            calls = (entry.engine.logprobs(row, adapter=entry.adapter) for row in rows)
            version = entry.adapter.policy_version
            return [
                replace(scored, policy_version=version) for scored in await asyncio.gather(*calls)
            ]

        return await self._use(name, call_adapted)

    async def _use(self, name: str, call: Callable[[_Entry], Coroutine[Any, Any, T]]) -> T:
        """Call with the adapter that has the name now; it stays until the call has ended.

        Raises NotFound (ADAPTER_NOT_FOUND), or Unavailable (ADAPTER_LOST) when new weights end the
        call.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise _unknown_error(name, self._entries)
        user = asyncio.ensure_future(call(entry))
        entry.users.add(user)
        try:
            return await user
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if entry.is_lost and not (asking and asking.cancelling()):
                raise _lost_error(name) from None
            raise
        finally:
            entry.users.discard(user)
            if entry.is_retired and not entry.users:
                self._spawn(self._remove(entry.engine, entry.adapter))

    async def _retire(self, entry: _Entry) -> None:
        entry.is_retired = True
        if not entry.users:
            await self._remove(entry.engine, entry.adapter)

    async def _remove(self, engine: SupportsAdapters, adapter: Adapter) -> None:
        await engine.remove_adapter(adapter)
        # Until it was removed the engine could read the files again.
        await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    def _spawn(self, removal: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _prove(
        self,
        engine: SupportsAdapters,
        adapter: Adapter,
        manifest: WeightsManifest,
        *,
        must_show: bool,
    ) -> None:
        """Compare log-probs with and without the adapter, and with those that the probes hold."""
        if must_show and await self._largest_change(engine, adapter) == 0.0:
            raise PreconditionFailed(
                f"The engine took adapter {adapter.name} and its log-probs do not change.",
                reason=Reason.ADAPTER_NOT_IN_USE,
                remedy="Report the adapter's config: this engine skips its modules.",
            )
        limit = manifest.max_logprob_difference or _MAX_DIFFERENCE
        for probe in manifest.probes:
            scored = await engine.logprobs(probe.token_ids, adapter=adapter)
            worst = _largest_difference(scored.logprobs, probe.logprobs)
            if not worst <= limit:
                raise PreconditionFailed(
                    f"With adapter {adapter.name} a probe's log-probs are {worst:.3g} nats from "
                    f"those announced, more than {limit:.3g}.",
                    reason=Reason.PROBE_MISMATCH,
                    remedy="Score the probe with the published adapter on the policy served here.",
                )

    async def _largest_change(self, engine: SupportsAdapters, adapter: Adapter) -> float:
        length = min(_PROBE_TOKENS, self._engine.max_model_len)
        ids = np.random.default_rng(0).integers(0, self._engine.vocab_size, size=length).tolist()
        base, adapted = await engine.logprobs(ids), await engine.logprobs(ids, adapter=adapter)
        return _largest_difference(adapted.logprobs, base.logprobs)

    def _require_newer(self, name: str, version: PolicyVersion) -> None:
        entry = self._entries.get(name)
        current = None if entry is None else entry.adapter.policy_version
        same_lineage = current is not None and current.lineage == version.lineage
        if current is not None and same_lineage and version.number <= current.number:
            raise PreconditionFailed(
                f"Adapter {name} {version} is not newer than {current}, which is loaded.",
                reason=Reason.VERSION_NOT_NEWER,
                remedy="Publish with a higher number, or in a new lineage.",
            )

    def _folder(self) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="dialoop-adapters-"))
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        return self._root


def _label(sampled: Sampled, version: PolicyVersion) -> Sampled:
    """Label all tokens with one version: new weights would have ended the sample."""
    length = len(sampled.token_ids)
    span = VersionSpan(start=0, length=length, policy_version=version)
    return replace(sampled, versions=(span,) if length else ())


def _largest_difference(own: Floats, expected: Floats) -> float:
    """Return the largest difference in nats; infinite for other lengths, or where one is NaN."""
    if len(own) != len(expected):
        return float("inf")
    worst = float(np.abs(own - expected).max(initial=0.0))
    return float("inf") if np.isnan(worst) else worst


def _unknown_error(name: str, loaded: Sequence[str] | dict[str, _Entry]) -> NotFound:
    names = ", ".join(sorted(loaded)) or "none"
    return NotFound(
        f"There is no adapter {name!r} here; loaded: {names}.",
        reason=Reason.ADAPTER_NOT_FOUND,
        remedy="Load it first with LoadWeights and a manifest that names it.",
    )


def _lost_error(name: str) -> Unavailable:
    return Unavailable(
        f"New weights were loaded, and adapter {name!r} belonged to those before.",
        reason=Reason.ADAPTER_LOST,
        remedy="Load the adapter again.",
    )
