"""LoRA adapter files: whether one fits the model, and the PEFT folder that engines read.

An adapter is a PEFT one: `adapter_config.json` and a safetensors file whose tensors are named
`base_model.model.<module>.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.lora.adapter_config import AdapterConfig
from dialoop_learning.model.weight_files import Shapes, read_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_VISIBLE_RMS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """How many adapters an engine is built for (0: none), and of what rank."""

    max_adapters: int = 0
    max_rank: int = 16


NO_ADAPTERS = AdapterLimits()
"""Adapters are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpace:
    """Which adapters an engine can hold: its limits, and the weights [out, in] it has."""

    limits: AdapterLimits
    shapes: Shapes

    @property
    def modules(self) -> dict[str, tuple[int, ...]]:
        """Return the linear layers that an adapter may change, by name."""
        return {
            name: shape for name, shape in modules_of(self.shapes).items() if ".layers." in name
        }


def modules_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the weights [out, in] of a model by the names of their modules."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def require_fitting(path: Path, config: AdapterConfig, space: AdapterSpace) -> tuple[str, ...]:
    """Return the modules an adapter file changes; PreconditionFailed when it does not fit.

    Reads the header only.
    """
    most = space.limits.max_rank
    if config.rank > most:
        raise PreconditionFailed(
            f"The adapter's rank is {config.rank}, this replica holds up to {most}.",
            reason=Reason.ADAPTER_MISMATCH,
            remedy="Set DIALOOP_INFERENCE_MAX_ADAPTER_RANK to at least the rank.",
        )
    return fitting_modules(path, config, space.modules)


def fitting_modules(
    path: Path, config: AdapterConfig, modules: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Return the modules an adapter file changes; PreconditionFailed if it is of another model.

    Reads the header only.
    """
    sides = _sides(path)
    for module, shapes in sides.items():
        _require_shapes(module, shapes, modules.get(module), rank=config.rank)
        if not config.names(module):
            raise _mismatch(f"{module} is not one of its target modules")
    if not isinstance(config.targets, str):
        for target in config.targets:
            if not any(m == target or m.endswith(f".{target}") for m in sides):
                raise _mismatch(f"it has no tensors for its target module {target}")
    return tuple(sides)


def write_folder(folder: Path, path: Path, config: AdapterConfig, modules: Iterable[str]) -> None:
    """Write the adapter as a PEFT directory of its own."""
    folder.mkdir(parents=True)
    shutil.copyfile(path, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(config.to_json(modules), encoding="utf-8")


def finite_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors, of one number format; InvalidInput when a number is not finite."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise _mismatch("its tensors are of several number formats")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise InvalidInput(
            "The adapter holds numbers that are not finite.",
            reason=Reason.ADAPTER_NOT_FINITE,
            remedy="Publish an adapter of a training step that did not overflow.",
        )
    return tensors


def is_visible(path: Path, config: AdapterConfig) -> bool:
    """Return whether the adapter adds enough for log-probs to show it.

    The root mean square of an entry of scaling * B @ A, in any module. InvalidInput when a number
    is not finite.
    """
    tensors = finite_tensors(path)
    for name, down in tensors.items():
        if ".lora_A." in name:
            delta = tensors[name.replace(".lora_A.", ".lora_B.")].float() @ down.float()
            if config.scaling * float(delta.pow(2).mean().sqrt()) >= _VISIBLE_RMS:
                return True
    return False


def _sides(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of A and B by module."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in read_shapes(path).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _mismatch(f"{name} is not a LoRA tensor of PEFT's naming")
        sides.setdefault(match["module"], {})[match["side"]] = shape
    if not sides:
        raise _mismatch("it holds no tensors")
    return sides


def _require_shapes(
    module: str,
    shapes: Mapping[str, tuple[int, ...]],
    weight: tuple[int, ...] | None,
    *,
    rank: int,
) -> None:
    if weight is None:
        raise _mismatch(f"the model has no linear layer {module}")
    expected = {"A": (rank, weight[1]), "B": (weight[0], rank)}
    for side, shape in expected.items():
        if shapes.get(side) != shape:
            raise _mismatch(f"{module}.lora_{side} is {shapes.get(side)}, expected {shape}")


def _mismatch(what: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"The adapter does not fit: {what}.",
        reason=Reason.ADAPTER_MISMATCH,
        remedy="Publish an adapter that was trained on the model this replica serves.",
    )
