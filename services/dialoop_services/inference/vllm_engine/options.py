"""Engine options and sampling parameters as vLLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm
from dialoop.errors import InvalidConfig
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.vllm_readings import require_same_reading
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.vllm_engine.adapters import lora_arguments
from dialoop_services.inference.vllm_engine.constraints import structured_outputs
from dialoop_services.inference.vllm_engine.transfer import transfer_arguments

_EXTENSION = "dialoop_services.inference.vllm_engine.weights.WeightsExtension"
_LEAST_SHARE = 0.01
"""Of a GPU's memory: what vLLM demands to be free when it starts, where its cache has a fixed size.
Its own default would be .92, and no replica could start or restart beside a trainer."""


def frees_memory_asleep(options: EngineOptions) -> bool:
    """Return whether the engine sleeps, on a device whose memory vLLM can give back."""
    return options.device_lock is not None and current_platform.is_sleep_mode_available()


def engine_args(model_dir: Path, options: EngineOptions) -> AsyncEngineArgs:
    """Return the arguments of vLLM; InvalidConfig when the model has too few positions."""
    if options.own.get("enforce_eager") is False and not current_platform.is_cuda():
        raise InvalidConfig(
            "enforce_eager is false in [inference.engine], and only CUDA has graphs to capture.",
            remedy="Leave enforce_eager out.",
        )
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    require_same_reading(
        config.get("text_config", config), longest=options.max_model_len, where=str(model_dir)
    )
    limit = _max_positions(model_dir)
    if options.max_model_len >= limit:
        raise InvalidConfig(
            f"max_model_len is {options.max_model_len}, the model has {limit} positions "
            "and scoring needs one to spare.",
            remedy=f"Set DIALOOP_INFERENCE_MAX_MODEL_LEN to at most {limit - 1}.",
        )
    size: dict[str, Any] = {}
    if "gpu_memory_utilization" not in options.own:
        size = {
            "kv_cache_memory_bytes": options.kv_cache_bytes,
            "gpu_memory_utilization": _LEAST_SHARE,
        }
    named: dict[str, Any] = {
        # CUDA graphs save the launches of small kernels; on a CPU there is nothing to capture.
        "enforce_eager": not current_platform.is_cuda(),
    }
    if not current_platform.is_cuda():
        # A prompt is computed once for all samples of a group, but for what fills no block. vLLM's
        # own 128 on a CPU share nothing of most prompts; its attention there takes multiples of 32.
        named["block_size"] = 32
    return AsyncEngineArgs(
        model=str(model_dir),
        dtype=options.dtype,
        # One more, so that scoring a full context leaves room for the token vLLM must sample. That
        # token is never an input.
        max_model_len=options.max_model_len + 1,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        seed=options.seed,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        # "auto" would take a consolidated.safetensors, in Mistral's own names, before the index's.
        load_format="safetensors",
        worker_extension_cls=_EXTENSION,
        enable_sleep_mode=frees_memory_asleep(options),
        **lora_arguments(options.adapters, dtype=options.dtype),
        **transfer_arguments(options.weight_transfer),
        **{**size, **named, **options.own},
    )


def _max_positions(model_dir: Path) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir).get_text_config()
    return int(config.max_position_embeddings)


def vllm_params(sampling: SamplingParams, *, stop: StopTokens, room: int) -> vllm.SamplingParams:
    """Return vLLM's sampling parameters; log-probs are of the distribution sampled from."""
    return vllm.SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p or 0.0,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        max_tokens=room,
        seed=sampling.seed,
        stop=list(stop.strings),
        include_stop_str_in_output=True,
        stop_token_ids=sorted(stop.by_id),
        # Only the request's stop tokens count: vLLM would add those of the model directory.
        ignore_eos=True,
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        detokenize=bool(stop.strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=structured_outputs(sampling.constraint),
    )
