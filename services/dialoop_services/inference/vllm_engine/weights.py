"""The exact replacement of weights inside vLLM's worker process.

On a CPU `internals.reload_packed` does it. Elsewhere vLLM packs nothing, and its own reload is
exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.lora.base_weights import BaseWeights
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.platforms import current_platform

from dialoop_services.inference.vllm_engine.internals import reload_packed
from dialoop_services.inference.vllm_engine.orphans import end_with_owner
from dialoop_services.inference.vllm_engine.sleep import SharedDevice
from dialoop_services.inference.vllm_engine.transfer import TransferWorker

HEAD = "lm_head.weight"

# Only vLLM's worker imports this module, and before it builds anything: the service may die then.
end_with_owner()


class WeightsExtension(SharedDevice, TransferWorker):
    """The worker extension: `collective_rpc("dialoop_load_weights", args=(path, tied))`."""

    model_runner: Any

    def dialoop_load_weights(self, path: str, tied: bool) -> str:
        """Replace all weights from a safetensors file; return an error's text, empty for none.

        An exception would end the whole engine and every running request.
        """
        return self._dialoop_replace(_tensors(path, tied=tied))

    def dialoop_load_onto_base(
        self, files: list[str], tied: bool, adapter: str, scaling: float
    ) -> str:
        """As `dialoop_load_weights`, of the base weights in `files` with the adapter added in."""
        base = BaseWeights(files=tuple(map(Path, files)), tied=tied)
        return self._dialoop_replace(_sum(base, adapter, scaling))

    def _dialoop_replace(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
        try:
            if current_platform.is_cpu():
                reload_packed(self, tensors)
            else:
                self.model_runner.reload_weights(weights_iterator=tensors)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _tensors(path: str, *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            if not (tied and name == HEAD):
                yield name, file.get_tensor(name)


def _sum(base: BaseWeights, adapter: str, scaling: float) -> Iterator[tuple[str, torch.Tensor]]:
    device = current_platform.device_type  # on a GPU the sum costs nothing beside the copy
    yield from base.with_adapter(load_file(adapter), scaling=scaling, device=device)
