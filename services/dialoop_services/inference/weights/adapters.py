"""The LoRA adapters of a replica: loaded beside the policy, proved to be in use, swapped, unloaded.

A swap gives the adapter a new slot, which no engine has keys of. Samples under way end with the
adapter they began with, new ones take the new one, so one version explains each sample. Adapters
belong to the weights they were loaded on: new weights end them, and what samples with them.
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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from dialoop.errors import (
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from dialoop.reasons import Reason

from dialoop_services.inference.engine import LoadTimes, VersionSpan
from dialoop_services.inference.weights.adapter_files import (
    AdapterSpace,
    is_visible,
    require_fitting,
    write_folder,
)
from dialoop_services.inference.weights.loadable import Adapter
from dialoop_services.learning.lora.adapter_config import AdapterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dialoop.clients.weights import WeightsManifest
    from dialoop.sequences import Floats, PolicyVersion

    from dialoop_services.inference.engine import OnTokens, Sampled, Scored

    T = TypeVar("T")
    Sampling = Callable[
        ["Adapter | None", OnTokens | None], Coroutine[Any, Any, tuple[Sampled, ...]]
    ]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PROBE_TOKENS = 48
_MAX_DIFFERENCE = 1e-3


class AdapterHost(Protocol):
    """The engine that adapters are loaded into."""

    max_model_len: int
    vocab_size: int
    adapter_space: AdapterSpace

    async def add_adapter(self, adapter: Adapter) -> None:
        """Take it in; PreconditionFailed (ADAPTER_REFUSED) and no change when it cannot."""
        ...

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Give it up; nothing samples with it any more."""
        ...

    async def logprobs(self, token_ids: Sequence[int], *, adapter: Adapter | None = None) -> Scored:
        """Score given ids, with an adapter or without."""
        ...


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An adapter and the samples under way with it; `is_lost` once new weights ended it."""

    adapter: Adapter
    users: set[asyncio.Task[Any]] = field(default_factory=set)
    is_lost: bool = False
    is_retired: bool = False


class Adapters:
    """Owns which name is which adapter. The replica calls `load`, `unload` and `clear` in turn."""

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._entries: dict[str, _Entry] = {}
        self._slots = itertools.count(1)
        self._root: Path | None = None
        # Filled when the last user of a retired adapter ends; each drains itself.
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """The loaded adapters by name."""
        return {name: entry.adapter.policy_version for name, entry in self._entries.items()}

    def require(self, name: str) -> None:
        """Refuse the name of no adapter: NotFound (ADAPTER_NOT_FOUND). Empty is the policy."""
        if name and name not in self._entries:
            raise _unknown(name, self._entries)

    def require_room(self, manifest: WeightsManifest) -> AdapterConfig:
        """Refuse before any byte is read what can never be loaded here."""
        name, space = manifest.adapter, self._host.adapter_space
        if not space.limits.max_adapters:
            raise PreconditionFailed(
                "This replica serves no adapters: they would halve its throughput.",
                reason=Reason.ADAPTERS_DISABLED,
                remedy="Start it with DIALOOP_INFERENCE_MAX_ADAPTERS=1 or more.",
            )
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"{name!r} is no name for an adapter.",
                reason=Reason.INVALID_ADAPTER_NAME,
                remedy="Use up to 64 letters, digits, dots, dashes and underscores.",
            )
        if name not in self._entries and len(self._entries) >= space.limits.max_adapters:
            raise CapacityExhausted(
                f"{len(self._entries)} adapters are loaded, which is all this replica holds.",
                reason=Reason.TOO_MANY_ADAPTERS,
                remedy="Unload one, or raise DIALOOP_INFERENCE_MAX_ADAPTERS.",
            )
        self._require_newer(name, manifest.policy_version)
        return AdapterConfig.from_json(manifest.adapter_config_json)

    async def load(self, path: Path, manifest: WeightsManifest) -> LoadTimes:
        """Load or swap; whatever fails, the adapter that had the name stays."""
        begun = time.monotonic()
        config = self.require_room(manifest)
        modules = require_fitting(path, config, self._host.adapter_space)
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
            await self._host.add_adapter(adapter)
            await self._prove(adapter, manifest, must_show=visible)
        except BaseException:
            await self._remove(adapter)
            raise
        before = self._entries.get(adapter.name)
        self._entries[adapter.name] = _Entry(adapter=adapter)
        if before is not None:
            await self._retire(before)
        return LoadTimes(pause_s=0.0, load_s=time.monotonic() - begun)

    async def unload(self, name: str) -> bool:
        """Forget the name; samples under way with it end undisturbed. False when there is none."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        await self._retire(entry)
        return True

    async def clear(self) -> None:
        """End every adapter, and every sample under way with one: new weights are coming."""
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
        """`call` with the named adapter, empty for none; tokens carry the adapter's version."""
        if not name:
            return await call(None, on_tokens)

        async def adapted(adapter: Adapter) -> tuple[Sampled, ...]:
            version = adapter.policy_version
            tell = on_tokens and (lambda piece: on_tokens(replace(piece, policy_version=version)))
            return tuple(_stamped(one, version) for one in await call(adapter, tell))

        return await self.use(name, adapted)

    async def logprobs(self, name: str, rows: Sequence[Sequence[int]]) -> list[Scored]:
        """Score rows with the named adapter, empty for none."""
        if not name:
            return await asyncio.gather(*(self._host.logprobs(row) for row in rows))

        async def adapted(adapter: Adapter) -> list[Scored]:
            calls = (self._host.logprobs(row, adapter=adapter) for row in rows)
            scored = await asyncio.gather(*calls)
            return [replace(one, policy_version=adapter.policy_version) for one in scored]

        return await self.use(name, adapted)

    async def use(self, name: str, call: Callable[[Adapter], Coroutine[Any, Any, T]]) -> T:
        """`call` with the adapter that has the name now; it stays until the call has ended.

        NotFound (ADAPTER_NOT_FOUND); Unavailable (ADAPTER_LOST) when new weights end the call.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise _unknown(name, self._entries)
        user = asyncio.ensure_future(call(entry.adapter))
        entry.users.add(user)
        try:
            return await user
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if entry.is_lost and not (asking and asking.cancelling()):
                raise _lost(name) from None
            raise
        finally:
            entry.users.discard(user)
            if entry.is_retired and not entry.users:
                self._spawn(self._remove(entry.adapter))

    async def _retire(self, entry: _Entry) -> None:
        entry.is_retired = True
        if not entry.users:
            await self._remove(entry.adapter)

    async def _remove(self, adapter: Adapter) -> None:
        await self._host.remove_adapter(adapter)
        # Until now the engine could read the files again.
        await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    def _spawn(self, removal: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _prove(self, adapter: Adapter, manifest: WeightsManifest, *, must_show: bool) -> None:
        """Compare log-probs with and without it, and with those the publisher says it has."""
        if must_show and await self._largest_change(adapter) == 0.0:
            raise PreconditionFailed(
                f"The engine took adapter {adapter.name} and its log-probs do not change.",
                reason=Reason.ADAPTER_NOT_IN_USE,
                remedy="Report the adapter's config: this engine passes over its modules.",
            )
        limit = manifest.max_logprob_difference or _MAX_DIFFERENCE
        for probe in manifest.probes:
            found = (await self._host.logprobs(probe.token_ids, adapter=adapter)).logprobs
            worst = _largest_difference(found, probe.logprobs)
            if not worst <= limit:
                raise PreconditionFailed(
                    f"With adapter {adapter.name} a probe's log-probs are {worst:.3g} nats from "
                    f"those announced, more than {limit:.3g}.",
                    reason=Reason.PROBE_MISMATCH,
                    remedy="Score the probe with the published adapter on the policy served here.",
                )

    async def _largest_change(self, adapter: Adapter) -> float:
        length = min(_PROBE_TOKENS, self._host.max_model_len)
        ids = np.random.default_rng(0).integers(0, self._host.vocab_size, size=length).tolist()
        base = (await self._host.logprobs(ids)).logprobs
        return _largest_difference((await self._host.logprobs(ids, adapter=adapter)).logprobs, base)

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


def _stamped(sampled: Sampled, version: PolicyVersion) -> Sampled:
    """One version explains all of it: new weights would have ended it."""
    length = len(sampled.token_ids)
    span = VersionSpan(start=0, length=length, policy_version=version)
    return replace(sampled, versions=(span,) if length else ())


def _largest_difference(found: Floats, expected: Floats) -> float:
    """In nats; infinite when the rows are of different lengths or hold no numbers."""
    if len(found) != len(expected):
        return float("inf")
    worst = float(np.abs(found - expected).max(initial=0.0))
    return float("inf") if np.isnan(worst) else worst


def _unknown(name: str, loaded: Sequence[str] | dict[str, _Entry]) -> NotFound:
    names = ", ".join(sorted(loaded)) or "none"
    return NotFound(
        f"There is no adapter {name!r} here; loaded: {names}.",
        reason=Reason.ADAPTER_NOT_FOUND,
        remedy="Load it first with LoadWeights and a manifest that names it.",
    )


def _lost(name: str) -> Unavailable:
    return Unavailable(
        f"New weights were loaded, and adapter {name!r} belonged to those before.",
        reason=Reason.ADAPTER_LOST,
        remedy="Load the adapter again.",
    )
