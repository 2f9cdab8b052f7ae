"""Measure the milliseconds that a publish stops generation, beside a plain copy of its bytes.

Sixteen answers run while new weights are loaded. `pause_ms` is what the engine says, from pausing
to going on; `longest_gap_ms` is what a stream sees between two of its tokens when a load falls
there, against `step_ms`, its usual gap. `adapter` is a publish of a LoRA adapter of rank 8 on all
linear layers, which the replica adds into its base weights; `export_ms` is what the trainer takes
to write it, or `whole_export_ms` the merged weights. `side_by_side` is how long idle replicas take
to load: one, and two at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dialoop.episode import UpdateMode
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_learning.lora.layers import ADAPTER
from dialoop_services.config.tables import ModelSection
from dialoop_services.inference.engine import (
    Engine,
    EngineOptions,
    LoadTimes,
    StopTokens,
    TokenChunk,
)
from dialoop_services.inference.vllm_engine.environment import prepare
from dialoop_services.inference.weights.loadable import PolicyAdapter
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.models import SIZES, make_model

IN_FLIGHT, MAX_MODEL_LEN = 16, 448


def _plain_copy_ms(path: Path, times: int) -> list[float]:
    """Return the milliseconds of reading the file into tensors that exist already."""
    targets = load_file(path)
    times_ms = []
    for _ in range(times):
        begun = time.perf_counter()
        with safe_open(path, framework="pt") as file:
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))
        times_ms.append((time.perf_counter() - begun) * 1e3)
    return times_ms


async def _engine(kind: str, model_dir: Path) -> Any:
    options = EngineOptions(max_model_len=MAX_MODEL_LEN)
    if kind == "vllm":
        from dialoop_services.inference.vllm_engine.engine import VllmEngine

        return await VllmEngine.start(model_dir, replace(options, kv_cache_bytes=512 << 20))
    from dialoop_services.inference.transformers_engine.engine import TransformersEngine

    return await TransformersEngine.start(model_dir, replace(options, max_num_seqs=IN_FLIGHT))


async def _publish_under_load(
    engine: Any, load: Callable[[PolicyVersion], Awaitable[LoadTimes]], numbers: range
) -> dict[str, Any]:
    at: list[float] = []

    def record_gap(_: TokenChunk) -> None:
        at.append(time.perf_counter())

    pauses, loads, gaps, steps = [], [], [], []
    for number in numbers:
        at.clear()
        sampling = SamplingParams(max_new_tokens=120)
        running = [
            asyncio.create_task(
                engine.sample([5, 6, 7, n], sampling, stop=StopTokens())
                if n
                else engine.stream([5, 6, 7, n], sampling, stop=StopTokens(), on_tokens=record_gap)
            )
            for n in range(IN_FLIGHT)
        ]
        while len(at) < 30:  # noqa: ASYNC110 - a look each millisecond is what is measured with
            await asyncio.sleep(0.001)
        begun = time.perf_counter()
        version = PolicyVersion(lineage="bench", number=number)
        times = await load(version)
        ended = time.perf_counter()
        await asyncio.gather(*running)
        between = np.diff(at) * 1e3
        near = [gap for gap, t in zip(between, at[1:], strict=True) if begun <= t <= ended + 0.5]
        pauses.append(times.pause_s * 1e3)
        loads.append(times.load_s * 1e3)
        gaps.append(max(near, default=0.0))
        steps.append(float(np.median(between)))
    return {
        "pause_ms": round(float(np.median(pauses)), 1),
        "load_ms": round(float(np.median(loads)), 1),
        "longest_gap_ms": round(float(np.median(gaps)), 1),
        "step_ms": round(float(np.median(steps)), 1),
    }


def _export_adapter(
    model_dir: Path, folder: Path, times: int
) -> tuple[PolicyAdapter, dict[str, Any]]:
    """Write an adapter as the trainer does; return it, and its milliseconds beside the whole's."""
    learner = Learner(TrainerSettings(model_dir=model_dir, model=ModelSection(lora_rank=8)))
    taken: dict[str, list[float]] = {ADAPTER: [], "whole.safetensors": []}
    sizes = {}
    for name in [*taken] * times:
        begun = time.perf_counter()
        sizes[name] = learner.export(folder / name).num_bytes
        taken[name].append((time.perf_counter() - begun) * 1e3)
    adapter, whole = (round(float(np.median(values)), 1) for values in taken.values())
    megabytes = round(sizes[ADAPTER] / 1e6, 2)
    share = round(sizes[ADAPTER] / sizes["whole.safetensors"], 4)
    return PolicyAdapter(path=folder / ADAPTER, scaling=2.0), {
        "megabytes": megabytes,
        "share_of_whole": share,
        "export_ms": adapter,
        "whole_export_ms": whole,
    }


async def _side_by_side(
    engine: Engine, second: Engine, path: Path, numbers: range
) -> dict[str, float]:
    """Return the milliseconds in which one idle replica loads a file, and two at the same time."""
    taken: dict[str, list[float]] = {"one_replica_ms": [], "two_replicas_ms": []}
    for number in numbers:
        version = PolicyVersion(lineage="bench", number=number)
        for name, engines in zip(taken, ((engine,), (engine, second)), strict=True):
            begun = time.perf_counter()
            await asyncio.gather(*(each.load_weights(path, version) for each in engines))
            taken[name].append((time.perf_counter() - begun) * 1e3)
    return {name: round(float(np.median(values)), 1) for name, values in taken.items()}


async def _measure(kind: str, size: str, times: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", size)
        path = Path(folder) / "next.safetensors"
        state = load_file(model_dir / "model.safetensors")
        save_file({name: tensor + 0.001 for name, tensor in state.items()}, path)
        adapter, exported = _export_adapter(model_dir, Path(folder), times)
        engine = await _engine(kind, model_dir)
        try:
            by_kind = {}
            loads: dict[str, Callable[[PolicyVersion], Awaitable[LoadTimes]]] = {
                "recompute": lambda v: engine.load_weights(path, v),
                "keep_kv": lambda v: engine.load_weights(path, v, mode=UpdateMode.KEEP_KV),
                "adapter": lambda v: engine.load_onto_base(adapter, v),
            }
            for index, (name, load) in enumerate(loads.items()):
                numbers = range(1 + index * times, 1 + (index + 1) * times)
                by_kind[name] = await _publish_under_load(engine, load, numbers)
            by_kind["adapter"] |= exported
            copies = _plain_copy_ms(path, times)
            other = await _engine(kind, model_dir)
            try:
                last = len(loads) * times
                together = await _side_by_side(engine, other, path, range(last + 1, last + times))
            finally:
                await other.close()
        finally:
            await engine.close()
    return {
        "megabytes": round(sum(t.numel() * t.element_size() for t in state.values()) / 1e6, 1),
        "parameters": sum(t.numel() for t in state.values()),
        "plain_copy_ms": round(float(np.median(copies)), 1),
        **by_kind,
        "side_by_side": together,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["vllm", "transformers"])
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--times", type=int, default=8)
    options = parser.parse_args()
    prepare()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    by_size = {
        f"{kind}_{size}": asyncio.run(_measure(kind, size, options.times))
        for kind in options.engines
        for size in options.sizes
    }
    head = {
        "benchmark": "publish_pause",
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "in_flight": IN_FLIGHT,
    }
    print_figures(head, by_size)


if __name__ == "__main__":
    main()
