"""Low-rank adapters by PEFT: the trainer trains only them, replicas serve W + alpha / rank B A.

add_lora(policy.causal_lm, rank=8, alpha=16.0)
adapter_tensors(policy.causal_lm)         # what a publish sends, see base_weights
merge = merging(policy.causal_lm)         # adds a weight's adapter to it, by the model's names
{name: merge(name, weight) for name, weight in base_tensors(policy.causal_lm).items()}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from torch import Tensor, nn

from dialoop_learning.model.weight_files import ADAPTER_CONFIG

ADAPTER = "adapter_model.safetensors"
"""Name of the file of a PEFT directory that holds the adapter."""

_INSIDE_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_NAME = "default"
_PREFIX = "base_model.model."


def add_lora(causal_lm: Any, *, rank: int, alpha: float = 0.0, targets: Sequence[str] = ()) -> None:
    """Put adapters beside the linear layers `targets` (none: all of them) and freeze the rest.

    alpha 0 means twice the rank. Raises InvalidConfig (LORA_TARGET) for a name that the model does
    not have.
    """
    from peft import LoraConfig, inject_adapter_in_model  # imported late: it takes seconds
    from peft.tuners.lora.layer import ParamWrapper

    linear = _linear_layers(causal_lm)
    unknown = sorted(set(targets) - linear)
    if unknown:
        raise InvalidConfig(
            f"The model has no linear layer {', '.join(unknown)}.",
            reason=Reason.LORA_TARGET,
            remedy=f"Set lora_targets to some of {', '.join(sorted(linear))}.",
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        target_modules=sorted(set(targets) or linear),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    drawn = torch.get_rng_state()
    inject_adapter_in_model(config, causal_lm, adapter_name=_NAME)
    experts = sorted(n for n, m in causal_lm.named_modules() if isinstance(m, ParamWrapper))
    if experts:  # peft adapts fused experts too, where the targets name projections inside them
        dense = sorted(name for name in linear if name not in _INSIDE_EXPERTS)
        raise InvalidConfig(
            f"A LoRA adapter of experts ({experts[0]}) cannot be published.",
            reason=Reason.LORA_TARGET,
            remedy=f"Set lora_targets to some of {', '.join(dense)}.",
        )
    if next(causal_lm.parameters()).is_meta:
        torch.set_rng_state(drawn)
        _draw_again(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _draw_again(causal_lm: Any) -> None:
    """Give adapters values on the CPU, the same as PEFT drew and lost with weights on meta."""
    from peft.tuners.lora import LoraLayer

    for module in causal_lm.modules():
        if isinstance(module, LoraLayer):
            for factors in (module.lora_A, module.lora_B):
                old = factors[_NAME]
                new = nn.Linear(old.in_features, old.out_features, bias=False)
                factors[_NAME] = new.to(old.weight.dtype)
            module.reset_lora_parameters(_NAME, True)


def has_lora(causal_lm: Any) -> bool:
    """Return whether `add_lora` was called on the model."""
    return hasattr(causal_lm, "peft_config")


def base_tensors(causal_lm: Any) -> dict[str, Tensor]:
    """Return the weights without adapters, under the model's own names."""
    return {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in causal_lm.state_dict().items()
        if ".lora_" not in name
    }


def merging(causal_lm: Any) -> Callable[[str, Tensor], Tensor]:
    """Return a function that adds to a weight of that name the adapter it has, if it has one."""
    from peft.tuners.lora import LoraLayer

    layers = {
        f"{path}.weight": module
        for path, module in causal_lm.named_modules()
        if isinstance(module, LoraLayer)
    }

    @torch.no_grad()
    def merge(name: str, weight: Tensor) -> Tensor:
        layer: Any = layers.get(name)
        if layer is None:
            return weight
        down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        return merged_weight(weight, down, up, layer.scaling[_NAME])

    return merge


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Return W [out, in] + scaling * B [out, rank] @ A [rank, in] (arXiv 2106.09685, equation 3).

    The sum is in float32 or finer, rounded once to W's dtype. Trainer, replica and export all call
    this function, so they get the same bits.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    delta = (up.to(exact) @ down.to(exact)) * scaling
    return (weight.to(exact) + delta).to(weight.dtype)


def factors_of(adapter: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    """Return A and B of the weight `name` in a PEFT file's tensors; None without an adapter."""
    module = f"{_PREFIX}{name.removesuffix('.weight')}"
    down = adapter.get(f"{module}.lora_A.weight")
    return None if down is None else (down, adapter[f"{module}.lora_B.weight"])


def adapter_tensors(causal_lm: Any) -> dict[str, Tensor]:
    """Return the adapters alone, under the names of PEFT's file."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): tensor.detach()
        for name, tensor in causal_lm.state_dict().items()
        if ".lora_" in name
    }


def load_adapter(causal_lm: Any, tensors: dict[str, Tensor]) -> None:
    """Load adapters from `adapter_tensors`; raise InvalidConfig for those of other layers."""
    own = {name: tensor.shape for name, tensor in adapter_tensors(causal_lm).items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != own:
        raise InvalidConfig(
            "The checkpoint's adapter has another rank or other targets than the settings say.",
            reason=Reason.WEIGHTS_MISMATCH,
            remedy="Resume with the lora settings the run was started with.",
        )
    named = {
        name.removeprefix(_PREFIX).replace(".weight", f".{_NAME}.weight"): tensor
        for name, tensor in tensors.items()
    }
    causal_lm.load_state_dict(named, strict=False)


def save_adapter_config(causal_lm: Any, directory: Path, *, base: Path) -> str:
    """Write adapter_config.json, so that PEFT can load `directory`, and return its text."""
    config = causal_lm.peft_config[_NAME]
    config.base_model_name_or_path = str(base.resolve())
    config.save_pretrained(str(directory))
    path = directory / ADAPTER_CONFIG
    written = json.loads(path.read_text("utf-8"))
    written["target_modules"] = sorted(written["target_modules"])  # PEFT writes a set, in any order
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
    return text


def _linear_layers(causal_lm: Any) -> set[str]:
    """Return the last parts of the names of linear layers between embedding and head."""
    named = causal_lm.base_model.named_modules()
    return {name.rpartition(".")[2] for name, module in named if isinstance(module, nn.Linear)}
