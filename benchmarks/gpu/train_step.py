"""One train step on a GPU, as the trainer takes it: `python -m benchmarks.gpu.train_step KIND`.

It prints one JSON object of figures, and exits with 1 where a number is not what it must be.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows
from dialoop_services.config.memory import PROCESS_BYTES, ModelShape, Training, training_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.servers.families import make_family

CUDA = torch.device("cuda")
LENGTHS = (700, 301, 64, 5)
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
NUM_TOKENS = 8000
EXACT, HALF = 1e-3, 0.1
"""Nats by which log-probs may differ in float32 (with its products in TF32 off) and in bfloat16."""


def rows_of(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    """Return one packed row of random sequences."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        rows.append(TokenRow.from_demonstration(ids, [False] + [True] * (length - 1)))
    return pack_rows(rows)


def scores_of(policy: PolicyModel, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and the gradient of the first layer's queries, on the host."""
    logprobs = policy(batch).logprobs
    logprobs.sum().backward()
    name, parameter = next((n, p) for n, p in policy.named_parameters() if "q_proj" in n)
    assert parameter.grad is not None, name
    grad = parameter.grad
    whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return logprobs.detach().float().cpu(), whole.detach().float().cpu()


def compare(make: Callable[[PolicyModel], PolicyModel], *, bound: float) -> dict[str, Any]:
    """Compare a policy on the GPU, as `make` changes it, with the same one on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        directory = make_family("qwen3", Path(folder) / "model")
        expected = scores_of(load_policy(directory), batch := rows_of(300))
        policy = make(load_policy(directory, device=CUDA))
        actual = scores_of(policy, batch.to(CUDA))
    gap = float((actual[0] - expected[0]).abs().max())
    grad_gap = float((actual[1] - expected[1]).norm() / expected[1].norm())
    figures = {"logprob_difference": gap, "gradient_difference": grad_gap, "bound": bound}
    require(gap < bound and grad_gap < bound, figures)
    return figures


def parity() -> dict[str, Any]:
    """Compare float32 on both devices."""
    return compare(lambda policy: policy, bound=EXACT)


def fsdp() -> dict[str, Any]:
    """Shard the model over one device, as several ranks shard it over theirs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/ranks", rank=0, world_size=1
        )
        try:
            mesh = init_device_mesh("cuda", (1,))
            return compare(lambda policy: fully_shard(policy, mesh=mesh), bound=EXACT)
        finally:
            torch.distributed.destroy_process_group()


def cut() -> dict[str, Any]:
    """Compute log-probs by the cut kernel, in bfloat16."""

    def take(policy: PolicyModel) -> PolicyModel:
        policy.autocast = torch.bfloat16
        policy.take_kernel("cut", device=CUDA)
        return policy

    return compare(take, bound=HALF)


def offload() -> dict[str, Any]:
    """Keep activations on the host; the gradients stay, and the device needs less."""

    def take(policy: PolicyModel) -> PolicyModel:
        policy.offloads = True
        return policy

    figures = compare(take, bound=EXACT)
    peaks = [step_of(offloads=offloads)["peak_gib"] for offloads in (False, True)]
    figures |= {"peak_gib": peaks[0], "offloaded_peak_gib": peaks[1]}
    require(peaks[1] < peaks[0], figures)
    return figures


def bf16() -> dict[str, Any]:
    """Take steps of 8,000 tokens in bfloat16: speed, and memory against the formula."""
    figures = step_of(offloads=False)
    require(figures["peak_gib"] <= 1.2 * figures["formula_gib"], figures)
    return figures


def step_of(*, offloads: bool) -> dict[str, Any]:
    """Return tokens per second and the peak on the device of steps of one long sequence."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make_family("qwen3", Path(folder) / "model", fields=LARGE)
        policy = load_policy(directory, device=CUDA)
        fields = json.loads((directory / "config.json").read_text("utf-8"))
    policy.autocast, policy.offloads = torch.bfloat16, offloads
    optimizer = GuardedOptimizer(policy.parameters(), OptimizerSettings())
    batch = rows_of(300, (NUM_TOKENS,)).to(CUDA)
    seconds = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = -policy(batch).logprobs.mean()
        loss.backward()
        optimizer.step(float(loss.detach()))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    count = sum(parameter.numel() for parameter in policy.parameters())
    shape = ModelShape.of(fields, num_parameters=count)
    assert shape is not None
    training = Training(num_tokens=NUM_TOKENS, autocast="bfloat16", is_cpu=False)
    needed = training_memory(shape, training).total - PROCESS_BYTES
    return {
        "num_parameters": count,
        "tokens_per_s": NUM_TOKENS / min(seconds[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "formula_gib": needed / 2**30,
    }


def require(is_true: bool, figures: dict[str, Any]) -> None:
    """End with exit code 1 and the figures unless it holds."""
    if not is_true:
        sys.stderr.write(f"FAIL {json.dumps(figures)}\n")
        sys.exit(1)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "parity": parity,
    "bf16": bf16,
    "cut": cut,
    "fsdp": fsdp,
    "offload": offload,
}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(KINDS[sys.argv[1]]()) + "\n")
