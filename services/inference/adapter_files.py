"""LoRA adapter files: whether an adapter fits the model, and the folder both engines read.

An adapter is a PEFT one: `adapter_config.json` and a safetensors file whose tensors are named
`base_model.model.<module>.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidInput, PreconditionFailed, Unsupported

from services.inference.weights import read_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from services.inference.weights import Shapes

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_ALL_LINEAR = "all-linear"
_VISIBLE_RMS = 1e-4
# Options of PEFT that change what an adapter computes and that an engine would ignore or refuse.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "target_parameters",
    "trainable_token_indices", "layers_to_transform", "exclude_modules", "megatron_config",
)  # fmt: skip


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
        """The linear layers that an adapter may change, by name."""
        return {
            name: shape for name, shape in modules_of(self.shapes).items() if ".layers." in name
        }


def modules_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The weights [out, in] of a model by the names of their modules."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says; the adapter adds `scaling` * B @ A to a layer's weight."""

    rank: int
    alpha: float
    use_rslora: bool
    targets: str | tuple[str, ...]

    @classmethod
    def from_json(cls, text: str) -> AdapterConfig:
        """InvalidInput when it is no LoRA config, Unsupported for options an engine would miss."""
        config = _object(text)
        used = [name for name in _UNSUPPORTED if config.get(name)]
        if config.get("bias", "none") != "none":
            used.append("bias")
        if isinstance(config.get("init_lora_weights"), str):
            used.append("init_lora_weights")
        if used:
            raise Unsupported(
                f"The adapter uses {', '.join(used)}.",
                reason="ADAPTER_UNSUPPORTED",
                remedy="Train a plain LoRA adapter: one rank, no bias, no further modules.",
            )
        return _plain(config)

    @property
    def scaling(self) -> float:
        """The alpha over the rank, or over its root if rank-stabilised (arXiv:2312.03732)."""
        return float(self.alpha / (self.rank**0.5 if self.use_rslora else self.rank))

    def to_json(self, modules: Iterable[str]) -> str:
        """The config with its target modules by their whole names: one meaning in every engine."""
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "bias": "none",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
        }
        return json.dumps(config, indent=2)

    def names(self, module: str) -> bool:
        """Whether the config's target modules name this one, as PEFT reads them."""
        if isinstance(self.targets, str):
            return self.targets == _ALL_LINEAR or bool(re.fullmatch(self.targets, module))
        return any(module == t or module.endswith(f".{t}") for t in self.targets)


def require_fitting(path: Path, config: AdapterConfig, space: AdapterSpace) -> tuple[str, ...]:
    """The modules an adapter file changes; PreconditionFailed when the engine cannot hold it.

    Reads the header only.
    """
    most = space.limits.max_rank
    if config.rank > most:
        raise PreconditionFailed(
            f"The adapter's rank is {config.rank}, this replica holds up to {most}.",
            reason="ADAPTER_MISMATCH",
            remedy="Set DIALOOP_INFERENCE_MAX_ADAPTER_RANK to at least the rank.",
        )
    return fitting_modules(path, config, space.modules)


def fitting_modules(
    path: Path, config: AdapterConfig, modules: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """The modules an adapter file changes; PreconditionFailed when it is of none, or another model.

    Reads the header only.
    """
    sides = _sides(path)
    for module, found in sides.items():
        _require_shapes(module, found, modules.get(module), rank=config.rank)
        if not config.names(module):
            raise _mismatch(f"{module} is none of its target modules")
    if not isinstance(config.targets, str):
        for target in config.targets:
            if not any(m == target or m.endswith(f".{target}") for m in sides):
                raise _mismatch(f"it has no tensors for its target module {target}")
    return tuple(sides)


def write_folder(folder: Path, path: Path, config: AdapterConfig, modules: Iterable[str]) -> None:
    """Lay the adapter down as a PEFT directory of its own."""
    folder.mkdir(parents=True)
    shutil.copyfile(path, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(config.to_json(modules), encoding="utf-8")


def finite_tensors(path: Path) -> dict[str, Tensor]:
    """The adapter, in one number format; InvalidInput when a number of it is not finite."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise _mismatch("its tensors are of several number formats")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise InvalidInput(
            "The adapter holds numbers that are not finite.",
            reason="ADAPTER_NOT_FINITE",
            remedy="Publish an adapter of a training step that did not overflow.",
        )
    return tensors


def is_visible(path: Path, config: AdapterConfig) -> bool:
    """Whether what the adapter adds is large enough that log-probs must show it.

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


def _object(text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise _invalid("it is no JSON object")
    return config


def _plain(config: Mapping[str, Any]) -> AdapterConfig:
    rank, alpha, targets = (config.get(n) for n in ("r", "lora_alpha", "target_modules"))
    if config.get("peft_type", "LORA") != "LORA":
        raise _invalid(f"peft_type is {config['peft_type']!r}, not 'LORA'")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _invalid(f"r is {rank!r}, not a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise _invalid(f"lora_alpha is {alpha!r}, not a number")
    if isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets):
        targets = tuple(targets)
    if not targets or not isinstance(targets, str | tuple):
        raise _invalid(f"target_modules is {targets!r}, not names")
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(config.get("use_rslora")),
        targets=targets,
    )


def _sides(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of A and B by module."""
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
    found: Mapping[str, tuple[int, ...]],
    weight: tuple[int, ...] | None,
    *,
    rank: int,
) -> None:
    if weight is None:
        raise _mismatch(f"the model has no linear layer {module}")
    expected = {"A": (rank, weight[1]), "B": (weight[0], rank)}
    for side, shape in expected.items():
        if found.get(side) != shape:
            raise _mismatch(f"{module}.lora_{side} is {found.get(side)}, expected {shape}")


def _mismatch(what: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"The adapter does not fit: {what}.",
        reason="ADAPTER_MISMATCH",
        remedy="Publish an adapter that was trained on the model this replica serves.",
    )


def _invalid(what: str) -> InvalidInput:
    return InvalidInput(
        f"adapter_config_json: {what}.",
        reason="INVALID_ADAPTER_CONFIG",
        remedy="Send the adapter_config.json that PEFT's save_pretrained writes.",
    )
