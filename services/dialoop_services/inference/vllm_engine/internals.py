"""Names of vLLM 0.32.0 that it documents nowhere; no other file of this service uses any.

`engine.py` reads here when a sample began and which weights a running one has, `sleep.py` pauses
the core, `weights.py` and `transfer.py` reach into the worker. The trainer's end of vLLM's transfer
is `trainer/publish/vllm_transfer.py`.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from dialoop_learning.memory import return_free_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

VERSION = "0.32.0"


def check_version() -> None:
    """Warn of another vLLM than the one whose insides these are."""
    installed = str(vllm.__version__).partition("+")[0]
    if installed != VERSION:
        log.warning(
            "vLLM %s is installed, and Dialoop was tested with %s: install that one if the engine "
            "fails, or if a publish ends with OTHER_WEIGHTS.",
            installed,
            VERSION,
        )


def launch(args: AsyncEngineArgs, *, may_fork: bool) -> AsyncLLM:
    """Start vLLM; its core is a fork of this process where it may be, else a new interpreter.

    A fork need not import vLLM and torch once more, which takes 12 s of CPU time. vLLM itself
    always takes a new interpreter on a CPU, since OpenMP's threads may run already.
    """
    # Here, because vLLM's worker reads this file too and needs none of them.
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    is_uniprocess = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    if may_fork and is_uniprocess and not torch.cuda.is_available():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # A new interpreter would read it. OpenMP has started here, before it was set.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # Else a signal to the core would reach this process's event loop too.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=not args.disable_log_stats,
    )


async def pause(llm: AsyncLLM, mode: PauseMode, *, clear_cache: bool) -> None:
    """Stop the core; with `clear_cache` running requests lose their keys, or this raises.

    `AsyncLLM.pause_generation` does the same and then sleeps 20 ms, which is not needed here: every
    token on its way carries its version.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def samples_of(llm: AsyncLLM, request_id: str) -> set[str]:
    """Return the ids of a request's samples that have entered and not ended."""
    return set(llm.output_processor.external_req_ids.get(request_id, ()))


def has_started(llm: AsyncLLM, sample: str) -> bool:
    """Return whether a sample that had entered decodes by now, or has ended."""
    state = llm.output_processor.request_states.get(sample)
    return not (state and state.stats) or bool(state.stats.scheduled_ts)


def versions_so_far(llm: AsyncLLM, request_id: str) -> Sequence[tuple[str, int]]:
    """Return the labels of a running request with one sample, each with its first token."""
    processor = llm.output_processor
    (internal_id,) = processor.external_req_ids[request_id]
    starts: Sequence[tuple[str, int]] = processor.request_states[internal_id].weight_version_starts
    return starts


def is_nccl_off(worker: Any) -> bool:
    """Return whether a connected worker would receive nothing, as by VLLM_DISABLE_PYNCCL."""
    group = getattr(worker.weight_transfer_engine, "model_update_group", None)
    return bool(getattr(group, "disabled", False))


@torch.inference_mode()
def reload_packed(worker: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Replace the weights of a worker on a CPU, where vLLM packs every linear's for its kernel.

    It empties the parameter then, so neither vLLM's `load_weights` nor its `reload_weights` is
    right: the first finds no parameter, the second leaves the packed copy of a tied output head
    stale, without an error. Each emptied parameter is made again here, vLLM's own loader fills it
    (which fuses q, k and v, gate and up, and pads the vocabulary), and every packed layer is packed
    again, tied heads included.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    model = worker.model_runner.get_model()
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
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

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
