"""LoRA adapters in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from dialoop_services.inference.engine import engine_stopped

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from dialoop_services.inference.weights.adapter_files import AdapterLimits
    from dialoop_services.inference.weights.loadable import Adapter


def lora_arguments(limits: AdapterLimits, *, dtype: str) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs for adapters; empty when there are none."""
    if not limits.max_adapters:
        return {}
    if dtype == "float32" and current_platform.is_cuda():  # its kernel asserts it, in mid-start
        raise InvalidConfig(
            f"max_adapters is {limits.max_adapters} and dtype is float32, and vLLM on a GPU has "
            "adapters for 16-bit weights alone.",
            reason=Reason.ADAPTERS_NEED_16_BITS,
            remedy="Set DIALOOP_INFERENCE_DTYPE=bfloat16, or DIALOOP_INFERENCE_MAX_ADAPTERS=0.",
        )
    most = max(get_args(MaxLoRARanks))
    if limits.max_rank > most:
        raise InvalidConfig(
            f"max_adapter_rank is {limits.max_rank}, vLLM goes up to {most}.",
            remedy="Set DIALOOP_INFERENCE_MAX_ADAPTER_RANK lower.",
        )
    return {
        "enable_lora": True,
        # One more: after a swap the old adapter serves the samples it began, beside the new one.
        "max_loras": limits.max_adapters + 1,
        "max_cpu_loras": 2 * limits.max_adapters + 2,
        "max_lora_rank": min(r for r in get_args(MaxLoRARanks) if r >= limits.max_rank),
    }


def lora_request(adapter: Adapter) -> LoRARequest:
    """Return vLLM's request for a slot; its name and path are unique, as prefix cache keys."""
    return LoRARequest(adapter.key, adapter.slot, str(adapter.folder))


async def add_to_vllm(llm: AsyncLLM, adapter: Adapter) -> None:
    """Add an adapter; PreconditionFailed (ADAPTER_REFUSED) when one of its modules does not fit."""
    try:
        is_added = await llm.add_lora(lora_request(adapter))
    except EngineDeadError as error:
        raise engine_stopped() from error
    except Exception as error:  # vLLM wraps whatever its worker raised
        raise _refusal(adapter) from error
    if not is_added:
        raise _refusal(adapter)


async def remove_from_vllm(llm: AsyncLLM, adapter: Adapter) -> None:
    """Remove an adapter; a dead engine has none."""
    if not llm.errored:
        await llm.remove_lora(adapter.slot)


def _refusal(adapter: Adapter) -> PreconditionFailed:
    return PreconditionFailed(
        f"vLLM does not take adapter {adapter.name}.",
        reason=Reason.ADAPTER_REFUSED,
        remedy="See the service's log for vLLM's reason; vLLM takes plain LoRA on linear layers.",
    )
