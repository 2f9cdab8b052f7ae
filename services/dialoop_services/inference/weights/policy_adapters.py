"""Policies that come as a LoRA adapter: checked here, then added into the base weights.

Everything that can be wrong with one is found before a weight is touched, so a refusal leaves the
replica serving what it served.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop_services.inference.weights.adapter_files import (
    finite_tensors,
    fitting_modules,
    modules_of,
)
from dialoop_services.inference.weights.loadable import PolicyAdapter
from dialoop_services.inference.weights.publications import require_intact
from dialoop_services.learning.lora.adapter_config import AdapterConfig

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.inference.engine import Engine
    from dialoop_services.learning.lora.base_weights import BaseWeights


class BaseDigest:
    """The digest of an engine's base weights: summed when first asked for, and when they change."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: tuple[object, str] | None = None

    async def require(self, expected: str) -> None:
        """PreconditionFailed (BASE_MISMATCH) for an adapter of other weights."""
        from dialoop_services.learning.lora.base_weights import require_base

        base = self._engine.base_weights
        state = [(file.stat().st_size, file.stat().st_mtime_ns) for file in base.files]
        if self._known is None or self._known[0] != state:
            self._known = state, await asyncio.to_thread(base.digest)
        require_base(self._known[1], expected)


def policy_adapter(path: Path, manifest: WeightsManifest, base: BaseWeights) -> PolicyAdapter:
    """The announced file, as announced, finite, and of the base's layers.

    DataLost (CHECKSUM_MISMATCH), InvalidInput (INVALID_ADAPTER_CONFIG, ADAPTER_NOT_FINITE),
    PreconditionFailed (ADAPTER_MISMATCH) or Unsupported (ADAPTER_UNSUPPORTED).
    """
    require_intact(path, manifest)
    config = AdapterConfig.from_json(manifest.adapter_config_json)
    fitting_modules(path, config, modules_of(base.shapes()))
    finite_tensors(path)
    return PolicyAdapter(path=path, scaling=config.scaling)
