"""Measure vLLM on a CPU with and without a worker process of its own.

    python -m benchmarks.cpu_executors --rounds 3

`core` is what Dialoop starts: vLLM's engine core runs the model itself. `worker` is vLLM's default,
with VLLM_ENABLE_V1_MULTIPROCESSING=1: the core waits for a process that runs the model. Both serve
the demo's tiny model; an answer has 32 tokens. `cpu_ms` is the CPU of all processes for a request,
`latency_ms` its mean time from call to answer. The rounds of both take turns, each in a process of
its own, and all figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.inference.engine import Engine, EngineOptions, StopTokens
from dialoop_services.inference.vllm_engine.environment import Vllm

from benchmarks.servers.figures import print_figures

EXECUTORS = {"core": "0", "worker": "1"}
NUM_REQUESTS = {1: 16, 8: 64, 64: 256}
"""Requests by how many are in flight."""


def cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, ended ones too."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in [own, *own.children(recursive=True)])


async def sample(engine: Engine, num_in_flight: int) -> dict[str, float]:
    """Sample answers, so many at a time."""
    draw, places = random.Random(0), asyncio.Semaphore(num_in_flight)
    sampling, stop = SamplingParams(max_new_tokens=32), StopTokens(strings=(), by_id={})
    seconds = []

    async def request(prompt: list[int]) -> None:
        async with places:
            begin = time.perf_counter()
            await engine.sample(prompt, sampling, stop=stop)
            seconds.append(time.perf_counter() - begin)

    count = NUM_REQUESTS[num_in_flight]
    prompts = [[draw.randrange(10, 250) for _ in range(30)] for _ in range(count)]
    begin, cpu = time.perf_counter(), cpu_s()
    await asyncio.gather(*map(request, prompts))
    return {
        "cpu_ms": 1e3 * (cpu_s() - cpu) / count,
        "latency_ms": 1e3 * statistics.mean(seconds),
        "tokens_per_s": 32 * count / (time.perf_counter() - begin),
    }


async def measure(folder: Path) -> dict[str, float]:
    """Measure the executor that the environment names."""
    model_dir = make_tiny_model(folder / "model", seed=0)
    begin, cpu = time.perf_counter(), cpu_s()
    options = EngineOptions(max_model_len=256, max_num_seqs=64, seed=0)
    engine = await Vllm.start(model_dir, options)
    figures = {"start_s": time.perf_counter() - begin, "start_cpu_s": cpu_s() - cpu}
    await sample(engine, 8)  # warms up
    for num_in_flight in NUM_REQUESTS:
        for name, value in (await sample(engine, num_in_flight)).items():
            figures[f"{name} at {num_in_flight}"] = value
    await engine.close()
    return figures


def round_of(executor: str) -> dict[str, float]:
    """Return the figures of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.cpu_executors", "--executor", executor]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": EXECUTORS[executor]}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--executor", choices=EXECUTORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.executor:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(measure(Path(folder)))))
        return
    rounds = [{name: round_of(name) for name in EXECUTORS} for _ in range(options.rounds)]
    result = {
        executor: {
            figure: round(statistics.median(each[executor][figure] for each in rounds), 1)
            for figure in rounds[0][executor]
        }
        for executor in EXECUTORS
    }
    print_figures({"cores": os.cpu_count(), "load": os.getloadavg()[0]}, result)


if __name__ == "__main__":
    main()
