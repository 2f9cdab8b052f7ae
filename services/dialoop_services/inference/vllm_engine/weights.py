"""The exact replacement of weights inside vLLM's worker process.

On CPU vLLM packs every linear's weight for its kernel and empties the parameter, so neither vLLM's
`load_weights` nor its `reload_weights` is right there: the first finds no parameter, the second
leaves the packed copy of a tied output head stale, without an error. This module makes each emptied
parameter again, lets vLLM's own loader fill it (which fuses q, k and v, gate and up, and pads the
vocabulary), and packs every packed layer again, tied heads included. Elsewhere nothing is packed
and vLLM's own reload is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.memory import return_free_memory
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

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
                _reload_packed(self.model_runner.get_model(), tensors)
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


@torch.inference_mode()
def _reload_packed(model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    # A LoRA layer shows its base layer's attributes as its own.
    layers = (m for m in model.modules() if not isinstance(m, BaseLayerWithLoRA))
    packed = [module for module in layers if hasattr(module, "cpu_linear")]
    for module in packed:
        module.cpu_linear = torch.nn.functional.linear  # the packed copy goes before weights come
        if module.weight.numel() == 0:
            _make_weight(module)
    model.load_weights(tensors)
    for module in packed:
        module.quant_method.process_weights_after_loading(module)
    return_free_memory()


def _make_weight(module: Any) -> None:
    """Register the weight parameter again, as the layer's constructor did."""
    method = getattr(module, "quant_method", None)
    if not isinstance(module, LinearBase) or not isinstance(method, UnquantizedLinearMethod):
        raise TypeError(f"{type(module).__name__} is packed in a way that cannot be undone")
    has_v2 = hasattr(module, "weight_loader_v2")
    method.create_weights(
        module,
        getattr(module, "input_size_per_partition", module.input_size),
        module.output_partition_sizes,
        module.input_size,
        module.output_size,
        module.params_dtype,
        weight_loader=module.weight_loader_v2 if has_v2 else module.weight_loader,
    )
