"""Measure a GRPO update at Qwen3-0.6B's shape on one GPU: ours, TRL's and a plain loop's.

    python -m benchmarks.gpu.real_shape [--ways ours_entropy,trl,...] [--output FILE]

The model has random weights and its real head of 151,936 tokens. Every way trains the same 64
sequences (8 prompts of 64 to 256 tokens, 8 answers each of 16 to 1,024) by the same clipped loss,
with float32 weights, AdamW and autocast to bfloat16. Each has a process of its own, one after the
other, since together they do not fit on one device. `trl` is TRL with its defaults, which recompute
activations; `trl_bf16` is TRL without that, and `ours_recomputed` is ours with it.

Memory is the most that torch allocated on the device in a step: weights, gradients and optimiser
state (16 bytes a parameter, so 8.9 GiB) and what the step adds. First, the trainer's own steps of
one sequence of 1,000 to 16,000 tokens are set beside the formula that `dialoop config check` uses.
The file is written after each way, so that a run that is ended early keeps what it has.

The ways' losses are compared, and their gradients' norms, but for TRL's: it shows its gradients
after it clipped them.

Exit code 1: a loss or a norm differs. 2: this machine has no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.environment_doors import ROOT

WAYS = ("ours_entropy", "ours", "ours_recomputed", "ours_cut", "trl", "trl_bf16", "sorted_4",
        "sorted_1")  # fmt: skip
NEEDS = {"ours_cut": "cut_cross_entropy", "trl": "trl", "trl_bf16": "trl"}
STEPS, WARM = 5, 2
WITHIN = 0.1
"""Share by which the ways' losses and norms may differ: bfloat16 rounds each in its own order."""


def measure(way: str, folder: Path, log: Path) -> dict[str, Any]:
    """Return loss, norm, seconds and peak of a way; the end of its log where it fails."""
    orders = ["norm", *["step"] * (WARM + STEPS), "memory"]
    with log.open("w") as errors:
        done = subprocess.run(
            (sys.executable, "-m", "benchmarks.servers.train_step_way", way, str(folder), "8"),
            input="\n".join(orders) + "\n",
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(orders):
        return {"failed": log.read_text("utf-8", errors="replace")[-600:]}
    walls = [answer["wall_s"] for answer in answers[1 + WARM : -1]]
    return {
        **answers[0],
        "wall_s": statistics.median(walls),
        "slowest_s": max(walls),
        "peak_gib": answers[-1]["bytes"] / 2**30,
    }


def memory_beside_formula(model: Path) -> list[dict[str, Any]]:
    """Return peaks of the trainer's steps on the device, and what the formula says of them."""
    from dialoop_learning.model.weight_files import num_parameters
    from dialoop_services.config.memory import (
        PROCESS_BYTES,
        ModelShape,
        Training,
        training_memory,
    )

    fields = json.loads((model / "config.json").read_text("utf-8"))
    shape = ModelShape.of(fields, num_parameters=num_parameters(model))
    assert shape is not None
    on_device = {"device": "cuda", "autocast": "bfloat16"}
    steps = [
        {"num_tokens": num_tokens, "activation_checkpointing": recomputes, **on_device}
        for num_tokens in (1000, 4000, 16_000)
        for recomputes in (False, True)
    ]
    words = ("tests.support.programs.train_step_memory", str(model), json.dumps(steps))
    done = subprocess.run(
        (sys.executable, "-m", *words), capture_output=True, text=True, check=False, cwd=ROOT
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        training = Training(
            num_tokens=row["num_tokens"],
            recomputes=row["activation_checkpointing"],
            autocast="bfloat16",
            is_cpu=False,
        )
        formula = training_memory(shape, training).total - PROCESS_BYTES
        row |= {"formula": formula, "peak_over_formula": row["peak"] / formula}
    return rows if len(rows) == len(steps) else [*rows, {"failed": done.stderr[-600:]}]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/real_shape_gpu.json"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRAIN_STEP_DEVICE", "cuda")
    os.environ.setdefault("ROW_TOKENS", "8192")
    # Imported here, since the device is read when the modules are.
    import torch
    from dialoop_learning.model.real_shapes import make_real_shape

    from benchmarks.gpu.smoke import NO_GPU
    from benchmarks.servers.train_step_batch import load_batch, make_batch

    if not torch.cuda.is_available():
        print("This machine has no GPU that torch sees, so nothing was run.", file=sys.stderr)
        return NO_GPU
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_real_shape(folder / "model")
        (folder / "tokenizer").symlink_to(folder / "model")
        torch.manual_seed(0)
        make_batch(folder, num_prompts=options.num_prompts, group_size=8, seed=0)
        torch.cuda.empty_cache()
        batch = load_batch(folder)
        trained = sum(s.num_trained for s in batch)
        document = {
            "benchmark": "gpu_real_shape",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "num_sequences": len(batch),
            "num_tokens": sum(len(s.ids) for s in batch),
            "num_trained": trained,
            "memory": memory_beside_formula(folder / "model"),
            "ways": results,
        }
        for way in options.ways.split(","):
            if way in NEEDS and find_spec(NEEDS[way]) is None:
                results[way] = {"not_run": f"{NEEDS[way]} is not installed"}
                continue
            results[way] = result = measure(way, folder, folder / f"{way}.log")
            if "wall_s" in result:
                result["trained_tokens_per_s"] = trained / result["wall_s"]
            options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(way, json.dumps(result), flush=True)
    losses = {way: result["loss"] for way, result in results.items() if "loss" in result}
    norms = {way: results[way]["norm"] for way in losses if not way.startswith("trl")}
    return int(not losses or not (_agree(losses) and _agree(norms)))


def _agree(numbers: Mapping[str, float]) -> bool:
    middle = statistics.median(numbers.values()) if numbers else 0.0
    return all(abs(number - middle) <= WITHIN * abs(middle) for number in numbers.values())


if __name__ == "__main__":
    sys.exit(main())
