"""Measure tokens/s and peak memory of a GRPO update: ours, TRL's, torchrl's and a plain loop's.

    python -m benchmarks.train_step --vocabulary 8192 --peers-python V/bin/python

Same model (1.6M parameters in its layers, and the embeddings), same 16 sequences of log-normal
lengths, same clipped loss over tokens, AdamW and gradient clipping, float32 unless the way is TRL's
with bf16, same number of threads. Every way has a process of its own. Before anything is timed
their losses and gradients are compared. Then come rounds in which each way makes two steps, in
turn, so that what else runs on the machine slows all of them; the second step counts.

Answers have ragged lengths, or with --answer-tokens all the same. The gate compares CPU seconds of
`ours_entropy`, which is what a trainer does by default, with the best loop: any of TRL, torchrl and
the sorted loops.

A sorted loop with _onednn has the products that ours has (dialoop_learning.model.products)
and torch as it ships has not.

Memory is the peak of the process's resident set (VmHWM, reset before a step of its own) above what
was resident just before, when weights and optimiser state exist and freed memory has been given
back, less the bytes of the gradients.

TRL and torchrl stand in a virtual environment over ours; without it this says how to make one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.model.attention import share_prefixes
from dialoop_learning.model.tiny import make_tiny_model
from transformers import AutoConfig

from benchmarks.servers import train_step_batch
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.train_step_batch import Sequence, load_batch

OURS = ["ours", "ours_entropy", "ours_entropy_bonus"]
LOOPS = ["sorted_1", "sorted_2", "sorted_4"]
HERE = [*OURS, *LOOPS, *(f"{loop}_onednn" for loop in LOOPS)]
PEERS = ["trl", "trl_fp32", "trl_bf16", "torchrl", "torchrl_no_entropy"]
MATMUL = "peak"

SAME_LOSS, SAME_GRADIENT, BF16_GRADIENT = 1e-4, 1e-3, 0.2
"""Largest difference of losses, and of gradients as a share of their norm."""


HOW = """TRL and torchrl are not measured: {why}. To make an environment with them over ours:
    .venv/bin/python -m venv --without-pip V
    echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" \\
        > V/lib/python3.11/site-packages/ours.pth
    .venv/bin/python -m pip --python V/bin/python install "trl>=1.16,<2" "torchrl>=0.14,<0.15"
and name it: --peers-python V/bin/python"""


class Way:
    """A process that makes a train step for each order."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        self.log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.servers.train_step_way", name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )

    def ask(self, order: str) -> dict[str, float]:
        """Send one order and wait for its answer; RuntimeError when the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended: {Path(self.log.name).read_text()[-3000:]}")
        figures: dict[str, float] = json.loads(answer)
        return figures

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self.log.close()


def prove(ways: list[Way], folder: Path) -> dict[str, dict[str, float]]:
    """Compare losses and gradients of all ways with another way of their objective."""
    proofs = {}
    for way in ways:
        way.ask(f"prove {folder / way.name}.pt")
        proofs[way.name] = torch.load(folder / f"{way.name}.pt", weights_only=True)
    agreement = {}
    for name, proof in proofs.items():
        other = proofs["ours_entropy_bonus" if name == "torchrl" else "sorted_1"]
        if name in ("ours_entropy_bonus", MATMUL):
            continue
        assert proof["gradients"].keys() == other["gradients"].keys(), name
        pairs = [(g, other["gradients"][key]) for key, g in proof["gradients"].items()]
        off = torch.stack([(a - b).norm() for a, b in pairs]).norm()
        size = torch.stack([b.norm() for _, b in pairs]).norm()
        loss_off, gradient_off = abs(proof["loss"] - other["loss"]), float(off / size)
        half = name in ("trl", "trl_bf16")
        print(f"{name}: loss off by {loss_off:.1e}, gradient {gradient_off:.1e}", file=sys.stderr)
        assert loss_off < (1e-2 if half else SAME_LOSS), (name, proof["loss"], other["loss"])
        assert gradient_off < (BF16_GRADIENT if half else SAME_GRADIENT), (name, gradient_off)
        agreement[name] = {"loss_off": loss_off, "gradient_off": gradient_off}
    return agreement


def operations(batch: list[Sequence], config: Any) -> tuple[float, float]:
    """Floating point operations of forward and backward: every sequence alone; prompts shared.

    6 N for a token of the layers' N parameters, 6 V H for a trained token in the head, and for
    attention 12 H for each pair of a token and one before it, of all layers.
    """
    size, layers = config.hidden_size, config.num_hidden_layers
    keys = size * config.num_key_value_heads // config.num_attention_heads
    body = layers * (2 * size * (size + keys) + 3 * size * config.intermediate_size)
    head = 6 * config.vocab_size * size * sum(s.num_trained for s in batch)
    pairs = sum(len(s.ids) ** 2 / 2 for s in batch)
    rest = head + 12 * size * layers * pairs
    shared = share_prefixes(
        torch.cat([s.ids for s in batch]), tuple(len(s.ids) for s in batch)
    ).kept.numel()
    return rest + 6 * body * sum(len(s.ids) for s in batch), rest + 6 * body * shared


def measure_ways(ways: list[Way], rounds: int) -> None:
    """Let every way make two steps in each round, and count the second.

    A trainer makes step after step. A process that has waited for the others may find its memory
    gone from the caches, or reclaimed by the kernel.
    """
    for _ in range(rounds):
        for way in ways:
            way.ask("step")
            way.steps.append(way.ask("step"))


def figures(ways: list[Way], memory: dict[str, float], folder: Path) -> dict[str, Any]:
    """Return medians over the rounds, and their ratios to ours."""
    batch = load_batch(folder)
    trained = sum(s.num_trained for s in batch)
    alone, shared = operations(batch, AutoConfig.from_pretrained(folder / "model"))
    peak = 10 * 2 * 2048**3 / min(s["wall_s"] for w in ways if w.name == MATMUL for s in w.steps)
    median = {
        w.name: {k: statistics.median(s[k] for s in w.steps) for k in ("wall_s", "cpu_s")}
        for w in ways
        if w.name != MATMUL
    }
    rows = {
        name: {
            "trained_tokens_per_s": round(trained / took["wall_s"]),
            "trained_tokens_per_cpu_s": round(trained / took["cpu_s"]),
            "step_s": round(took["wall_s"], 3),
            "step_cpu_s": round(took["cpu_s"], 3),
            "ours_is_times_faster": round(took["wall_s"] / median["ours"]["wall_s"], 2),
            "ours_is_times_faster_cpu": round(took["cpu_s"] / median["ours"]["cpu_s"], 2),
            "peak_memory_mb": round(memory[name] / 1e6),
            "ours_takes_of_its_memory": round(memory["ours"] / memory[name], 2),
            "share_of_matmul_peak": round(alone / took["wall_s"] / peak, 2),
        }
        for name, took in median.items()
    }
    loops = {name: took["cpu_s"] for name, took in median.items() if name not in OURS}
    best = min(loops, key=lambda name: loops[name])
    ours = median["ours_entropy" if "ours_entropy" in median else "ours"]["cpu_s"]
    rows["ours"]["share_of_matmul_peak_computed"] = round(
        shared / median["ours"]["wall_s"] / peak, 2
    )
    return {
        "sequences": len(batch),
        "tokens": sum(len(s.ids) for s in batch),
        "trained_tokens": trained,
        "longest": max(len(s.ids) for s in batch),
        "matmul_peak_gflops": round(peak / 1e9),
        "best_loop": best,
        "best_loop_to_ours_cpu": round(loops[best] / ours, 2),
        "ways": rows,
    }


def peer_versions(python: str | None) -> dict[str, str]:
    """Return versions of trl and torchrl; none without an interpreter, SystemExit if missing."""
    if python is None:
        print(HOW.format(why="no --peers-python"), file=sys.stderr)
        return {}
    names = ("trl", "torchrl")
    program = "import json, sys; from importlib.metadata import version as v; "
    program += "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    answer = subprocess.run(
        [python, "-c", program, *names], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(HOW.format(why=f"{python} lacks one of {', '.join(names)}"))
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--answer-tokens", type=int, default=0, help="length of every answer; 0: ragged lengths"
    )
    parser.add_argument(
        "--peers-python", help="interpreter of the environment with trl and torchrl"
    )
    parser.add_argument("--ways", nargs="*", help="only these; ours and sorted_1 always")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    load = os.getloadavg()[0]
    versions, peers = peer_versions(arguments.peers_python), PEERS if arguments.peers_python else []
    names = [MATMUL, *HERE, *peers]
    if arguments.ways:
        kept = {MATMUL, "ours", "ours_entropy", "ours_entropy_bonus", "sorted_1", *arguments.ways}
        names = [name for name in names if name in kept]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tiny_model(folder / "tokenizer", seed=0)
        train_step_batch.make(
            folder,
            vocabulary=arguments.vocabulary,
            num_prompts=arguments.prompts,
            group_size=8,
            seed=arguments.seed,
            answer_tokens=arguments.answer_tokens,
        )
        pythons = dict.fromkeys(peers, arguments.peers_python)
        ways = [
            Way(name, pythons.get(name) or sys.executable, folder, arguments.threads)
            for name in names
        ]
        try:
            agreement = prove([way for way in ways if way.name != MATMUL], folder)
            ways[0].ask("step")
            measure_ways(ways, arguments.rounds)
            memory = {way.name: way.ask("memory")["bytes"] for way in ways}
            result = figures(ways, memory, folder)
        finally:
            for way in ways:
                way.close()
    versions |= {
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }
    answers = f"{arguments.answer_tokens} tokens each" if arguments.answer_tokens else "ragged"
    facts = {
        "benchmark": "train_step",
        "vocabulary": arguments.vocabulary,
        "answers": answers,
        "threads": arguments.threads,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "rounds": arguments.rounds,
        "versions": versions,
        "peers": "run" if peers else "not run: no --peers-python",
    }
    print_figures(facts, result | {"agreement": agreement})


if __name__ == "__main__":
    main()
