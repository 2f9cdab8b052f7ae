"""Measure tokens per second of the inference service and of vLLM's own AsyncLLM in the same run.

All get the same prompts and limits, with 1, 16, 64 and 128 requests in flight. The rounds
alternate, so that what else the machine does hits all of them. The services, of vLLM and of
transformers, are processes of their own, reached over gRPC. `start` is the wall and CPU time until
each serves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.rendering import GenerationRequest, Renderer
from dialoop_services.inference.vllm_engine.environment import prepare

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.models import SIZES, make_model

IN_FLIGHT, NEW_TOKENS, MAX_MODEL_LEN = (1, 16, 64, 128), 64, 256
ENGINES = ("vllm", "transformers")
RAW = "raw_async_llm"
Generate = Callable[[int], Awaitable[int]]


class Service:
    """An inference service in a process of its own; `start` is what starting it took."""

    def __init__(self, model_dir: Path, engine: str) -> None:
        settings = {
            "MODEL_DIR": str(model_dir),
            "ENGINE": engine,
            "PORT": "0",
            "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
            "MAX_NUM_SEQS": str(max(IN_FLIGHT)),
        }
        names = {f"DIALOOP_INFERENCE_{name}": value for name, value in settings.items()}
        begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dialoop_services.inference"],
            env=os.environ | names,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if " address=" in line:
                break
        else:
            raise RuntimeError(f"the service of {engine} did not start")
        self.address = line.rpartition(" address=")[2].strip().rstrip("]")
        wall_s = time.monotonic() - begun
        self.start = {"wall_s": round(wall_s, 1), "cpu_s": round(self.cpu_s(), 1)}

    def cpu_s(self) -> float:
        """CPU seconds of the service and of the processes that it runs."""
        service = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (service, *service.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def stop(self) -> None:
        """End the service."""
        self.process.terminate()
        self.process.wait()


async def _tokens_per_s(generate: Generate, num_requests: int, in_flight: int) -> float:
    """Return the tokens per second of all requests, `in_flight` at a time."""
    places = asyncio.Semaphore(in_flight)

    async def count_tokens(index: int) -> int:
        async with places:
            return await generate(index)

    begun = time.perf_counter()
    counts = await asyncio.gather(*(count_tokens(index) for index in range(num_requests)))
    return sum(counts) / (time.perf_counter() - begun)


async def _measure(
    model_dir: Path, services: dict[str, Service], options: argparse.Namespace
) -> dict[str, dict[int, list[float]]]:
    from dialoop_services.inference.vllm_engine.engine import VllmEngine
    from dialoop_services.inference.vllm_engine.options import vllm_params
    from vllm.inputs.engine import tokens_input

    sizes = EngineOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=max(IN_FLIGHT))
    engine = await VllmEngine.start(model_dir, sizes)
    renderer = Renderer.of(model_dir)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    histories = [
        History((Message(role="user", content=f"{10 + n % 90}+{17 + n % 80}"),))
        for n in range(max(IN_FLIGHT) * options.requests)
    ]
    rows = [
        renderer.prompt(GenerationRequest(history=h)).sequence.token_ids.tolist() for h in histories
    ]
    params = vllm_params(sampling, stop=renderer.stop_tokens(()), room=NEW_TOKENS)

    async def raw(index: int) -> int:
        outputs = engine._llm.generate(tokens_input(rows[index]), params, uuid.uuid4().hex)
        last = [output async for output in outputs][-1]
        return len(last.outputs[0].token_ids)

    ways: dict[str, Generate] = {RAW: raw}
    async with AsyncExitStack() as exits:
        exits.push_async_callback(engine.close)
        for name, service in services.items():
            channel = await exits.enter_async_context(Channel(service.address))
            ways |= _calls(InferenceClient(channel), name, histories, rows, sampling)
        rates: dict[str, dict[int, list[float]]] = {name: {} for name in ways}
        for in_flight in IN_FLIGHT:
            for way in ways.values():
                await _tokens_per_s(way, in_flight, in_flight)  # warm
            for _ in range(options.rounds):
                for name, way in ways.items():
                    requests = max(16, options.requests * in_flight)
                    rate = await _tokens_per_s(way, requests, in_flight)
                    rates[name].setdefault(in_flight, []).append(rate)
    return rates


def _calls(
    client: InferenceClient,
    engine: str,
    histories: list[History],
    rows: list[list[int]],
    sampling: SamplingParams,
) -> dict[str, Generate]:
    async def by_history(index: int) -> int:
        (sample,) = await client.generate(histories[index], sampling=sampling)
        return sample.sequence.num_model_tokens

    async def by_ids(index: int) -> int:
        (sample,) = await client.generate(token_ids=rows[index], sampling=sampling)
        return sample.sequence.num_model_tokens

    return {f"{engine}_history": by_history, f"{engine}_token_ids": by_ids}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="3m")
    parser.add_argument("--requests", type=int, default=4, help="requests for each in flight")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    prepare()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", options.size)
        services: dict[str, Service] = {}
        try:
            for engine in ENGINES:
                services[engine] = Service(model_dir, engine)
            rates = asyncio.run(_measure(model_dir, services, options))
        finally:
            for service in services.values():
                service.stop()
    medians: dict[str, dict[int, float]] = {
        way: {n: round(median(values), 1) for n, values in of.items()} for way, of in rates.items()
    }
    facts: dict[str, Any] = {
        "benchmark": "inference_tokens",
        "size": options.size,
        "new_tokens": NEW_TOKENS,
        "machine": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "start": {name: service.start for name, service in services.items()},
    }
    figures: dict[str, Any] = {
        "tokens_per_s": medians,
        "share_of_raw": {
            way: {n: round(rate / medians[RAW][n], 3) for n, rate in of.items()}
            for way, of in medians.items()
        },
        "rounds": {
            way: {n: [round(v, 1) for v in values] for n, values in of.items()}
            for way, of in rates.items()
        },
    }
    print_figures(facts, figures)


if __name__ == "__main__":
    main()
