"""The adapter_config.json of a LoRA adapter: the options that all parts of Dialoop compute alike.

AdapterConfig.from_json('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}').scaling  # 2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dialoop.errors import InvalidInput, Unsupported
from dialoop.reasons import Reason

_ALL_LINEAR = "all-linear"
# Options of PEFT that change what an adapter computes, and that an engine ignores or refuses.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "target_parameters",
    "trainable_token_indices", "layers_to_transform", "exclude_modules", "megatron_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The content of adapter_config.json. An adapter adds `scaling` * B @ A to a weight."""

    rank: int
    alpha: float
    use_rslora: bool
    targets: str | tuple[str, ...]

    @classmethod
    def from_json(cls, text: str) -> AdapterConfig:
        """Read adapter_config.json.

        Raises InvalidInput when it is not a LoRA config, and Unsupported for options that an engine
        would ignore.
        """
        config = _object(text)
        used = [name for name in _UNSUPPORTED if config.get(name)]
        if config.get("bias", "none") != "none":
            used.append("bias")
        if isinstance(config.get("init_lora_weights"), str):
            used.append("init_lora_weights")
        if used:
            raise Unsupported(
                f"The adapter uses {', '.join(used)}.",
                reason=Reason.ADAPTER_UNSUPPORTED,
                remedy="Train a plain LoRA adapter: one rank, no bias, no further modules.",
            )
        return _plain(config)

    @property
    def scaling(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) if rank-stabilised (arXiv 2312.03732)."""
        return float(self.alpha / (self.rank**0.5 if self.use_rslora else self.rank))

    def to_json(self, modules: Iterable[str]) -> str:
        """Return the config as JSON, with target modules by their whole names.

        Every engine understands whole names in the same way.
        """
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
        """Return whether the config's target modules name this one, as PEFT reads them."""
        if isinstance(self.targets, str):
            return self.targets == _ALL_LINEAR or bool(re.fullmatch(self.targets, module))
        return any(module == t or module.endswith(f".{t}") for t in self.targets)


def _object(text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _invalid("it is not a JSON object")
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
        raise _invalid(f"target_modules is {targets!r}, not a list of names")
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(config.get("use_rslora")),
        targets=targets,
    )


def _invalid(what: str) -> InvalidInput:
    return InvalidInput(
        f"adapter_config_json: {what}.",
        reason=Reason.INVALID_ADAPTER_CONFIG,
        remedy="Send the adapter_config.json that PEFT's save_pretrained writes.",
    )
