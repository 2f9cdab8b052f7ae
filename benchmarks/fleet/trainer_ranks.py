"""Measure the trained tokens a second of two trainer processes on two cores, and of one on one.

    python -m benchmarks.fleet.trainer_ranks --rounds 3
    python -m benchmarks.fleet.trainer_ranks --saves 5 --model runs/models/smollm2-135m-instruct

Both take the same train steps of GRPO (16 answers of 128 to 512 tokens to four prompts, two
updates) on a random model of 26 million parameters, in float32. Each process has one thread on a
core of its own. Rounds alternate, because others may load the machine: the load is among the
figures, and `of_best` compares the fastest step of each. `sent_bytes` is what the first rank sends
of a step's rows to the others.

The second line measures checkpoints instead: how long one holds up a step that waits for its write
(`whole_s`) and one that waits for its copy (`held_s`), beside the seconds of a step of 4 answers
(`step_s`), of one beside a write (`beside_s`), and until that write has ended (`behind_s`). The two
ways alternate. One process has both cores, and each of two has one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.model.tiny import tiny_config
from transformers import Qwen2ForCausalLM

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.rank_steps import VOCABULARY

PROGRAM = Path(__file__).parents[1] / "servers" / "rank_steps.py"


def make_model(directory: Path, *, hidden: int, layers: int) -> int:
    """Write a random model, and return its number of parameters."""
    config = tiny_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = VOCABULARY, hidden, 4 * hidden
    config.num_attention_heads, config.num_key_value_heads = hidden // 64, hidden // 64
    config.head_dim, config.num_hidden_layers = 64, layers
    config.layer_types, config.max_position_embeddings = ["full_attention"] * layers, 4096
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def run(
    folder: Path, size: int, num_steps: int, num_saves: int = 0, model: Path | None = None
) -> dict[str, Any]:
    """Return what `size` processes measured."""
    out = folder / f"figures of {size}.json"
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:size]))
    numbers = [str(num_steps), str(num_saves)]
    program = [str(PROGRAM), str(model or folder / "model"), str(out), cores, *numbers]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "client", root / "services")))
    subprocess.run(
        [sys.executable, *(launcher if size > 1 else []), *program],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    figures: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return figures


def measure(num_rounds: int, num_steps: int, hidden: int, layers: int) -> dict[str, Any]:
    """Return the figures of one process and of two, and what two are worth."""
    steps: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        count = make_model(Path(name) / "model", hidden=hidden, layers=layers)
        for _ in range(num_rounds):
            for size, found in steps.items():
                found += run(Path(name), size, num_steps)["steps"]
    rates = {
        size: [step["num_trained_tokens"] / step["seconds"] for step in found]
        for size, found in steps.items()
    }
    return {
        "num_parameters": count,
        "tokens_per_s": {size: statistics.median(found) for size, found in rates.items()},
        "of_median": statistics.median(rates[2]) / statistics.median(rates[1]),
        "of_best": max(rates[2]) / max(rates[1]),
        "cpu_seconds": {
            size: statistics.median(step["cpu_seconds"] for step in found)
            for size, found in steps.items()
        },
        "forwarded_tokens": {
            size: sum(step["num_forwarded_tokens"] for step in found)
            for size, found in steps.items()
        },
        "sent_bytes": statistics.median(step["sent_bytes"] for step in steps[2]),
        "load": statistics.median(step["load"] for found in steps.values() for step in found),
    }


def measure_saves(num_saves: int, model: Path | None, hidden: int, layers: int) -> dict[str, Any]:
    """Return the median figures of checkpoints of one process and of two."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        if model is None:
            model = Path(name) / "model"
            make_model(model, hidden=hidden, layers=layers)
        for size in (1, 2):
            saves = run(Path(name), size, 0, num_saves, model.resolve())["saves"]
            figures[f"saves_of_{size}"] = {
                key: round(statistics.median(save[key] for save in saves), 2) for key in saves[0]
            }
    return figures | {"load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--saves", type=int, default=0)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.saves:
        shape = (options.hidden, options.layers)
        figures = measure_saves(options.saves, options.model, *shape)
    else:
        figures = measure(options.rounds, options.steps, options.hidden, options.layers)
    print_figures({"processor": processor()}, figures)


if __name__ == "__main__":
    main()
