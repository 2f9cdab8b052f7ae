"""vLLM's model code beside transformers', on one row, without an engine: a second for each model.

python -m tests.support.programs.vllm_twin FAMILY < fields.json

reads a JSON object of names and fields that replace the family's own, and prints for each name the
largest difference of log-probs, or what refused the model. Attention is computed here, from what
vLLM's layers say of themselves; everything else is vLLM's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from dialoop_services.inference.vllm_engine.environment import prepare

prepare()
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from dialoop_services.inference.engine import EngineOptions  # noqa: E402
from dialoop_services.inference.vllm_engine import options  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

from benchmarks.servers.families import make_family  # noqa: E402

IDS = [
    5,
    9,
    17,
    30,
    7,
    6,
    40,
    41,
    42,
    43,
    44,
    45,
    46,
    47,
    48,
    3,
    11,
    60,
    61,
    22,
    23,
    24,
    19,
    18,
    70,
]
WIDE = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}


def attention(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Attend over the whole row as the layer says: its scale, soft cap, window and sinks."""
    num = len(query)
    queries = query.view(num, layer.num_heads, layer.head_size)
    times = layer.num_heads // layer.num_kv_heads
    keys = key.view(num, layer.num_kv_heads, layer.head_size).repeat_interleave(times, 1)
    values = value.view(num, layer.num_kv_heads, -1).repeat_interleave(times, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * layer.impl.scale
    cap = getattr(layer.impl, "logits_soft_cap", 0)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(num)[:, None] - torch.arange(num)
    hidden = distance < 0
    if layer.sliding_window is not None:
        hidden = hidden | (distance >= layer.sliding_window)
    scores = scores.masked_fill(hidden, float("-inf"))
    sinks = getattr(layer.impl, "sinks", None)
    if sinks is not None:
        sunk = sinks[:, None, None].expand(-1, num, 1)
        scores = torch.cat([scores, sunk], -1)
    weights = scores.softmax(-1)[..., :num]
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(num, -1)


@torch.inference_mode()
def of_vllm(model_dir: Path) -> torch.Tensor:
    """Log-probs [L, V] of vLLM's model."""
    args = options.engine_args(model_dir, EngineOptions(max_model_len=64, kv_cache_bytes=64 << 20))
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{model_dir}/meeting", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
        with set_forward_context(None, config, num_tokens=len(IDS)):
            hidden = model(torch.tensor(IDS), torch.arange(len(IDS)))
            logits = model.compute_logits(hidden[0] if isinstance(hidden, tuple) else hidden)
    assert logits is not None
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def of_transformers(model_dir: Path) -> torch.Tensor:
    """Log-probs [L, V] of transformers' model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    logits: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0]
    return logits.float().log_softmax(-1)


def compare(family: str, fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What became of one model: `difference`, or `nobody`, `refused` and by whom."""
    try:
        model_dir = make_family(family, folder, fields={**WIDE, **fields})
        ours = of_transformers(model_dir)
    except Exception as error:
        return {"nobody": f"{type(error).__name__}: {error}"}
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    refusal = ""
    try:
        options.require_same_reading(config, longest=len(IDS), where=family)
    except Exception as error:
        refusal = str(error)
    options.require_same_reading = lambda *_, **__: None  # type: ignore[assignment]
    try:
        theirs = of_vllm(model_dir)[:, : ours.shape[1]]
    except Exception as error:
        return {"refusal": refusal, "vllm": f"{type(error).__name__}: {error}"}
    difference = float((ours - theirs).abs().max())
    return {"refusal": refusal, "difference": difference}


def main() -> None:
    """Compare the models that standard input names."""
    Attention.forward = attention  # type: ignore[method-assign]
    torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does the same
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    require = options.require_same_reading
    for name, fields in json.load(sys.stdin).items():
        options.require_same_reading = require
        with tempfile.TemporaryDirectory() as folder:
            answer = compare(sys.argv[1], fields, Path(folder))
        sys.stdout.write(json.dumps({"name": name, **answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
