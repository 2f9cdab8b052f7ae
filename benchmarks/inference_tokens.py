"""Measure tokens per second of the inference service and of vLLM's own AsyncLLM in the same run.

Both get the same prompts and limits, 64 requests in flight. The rounds alternate, so that what else
the machine does hits both; the service is a process of its own, reached over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.rendering import GenerationRequest, Renderer
from dialoop_services.inference.vllm_engine.environment import prepare

from benchmarks.servers.models import SIZES, make_model

IN_FLIGHT, NEW_TOKENS, MAX_MODEL_LEN = 64, 64, 256
Generate = Callable[[int], Awaitable[int]]


def _launch(model_dir: Path) -> tuple[subprocess.Popen[str], str]:
    settings = {
        "MODEL_DIR": str(model_dir),
        "PORT": "0",
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "MAX_NUM_SEQS": str(IN_FLIGHT),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "dialoop_services.inference"],
        env=os.environ | {f"DIALOOP_INFERENCE_{name}": value for name, value in settings.items()},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " address=" in line:
            return process, line.rpartition(" address=")[2].strip().rstrip("]")
    raise RuntimeError("the service did not start")


async def _tokens_per_s(generate: Generate, num_requests: int) -> float:
    """Return the tokens per second of all requests, IN_FLIGHT at a time."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def count_tokens(index: int) -> int:
        async with places:
            return await generate(index)

    begun = time.perf_counter()
    counts = await asyncio.gather(*(count_tokens(index) for index in range(num_requests)))
    return sum(counts) / (time.perf_counter() - begun)


async def _measure(
    model_dir: Path, address: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    from dialoop_services.inference.vllm_engine.engine import VllmEngine
    from dialoop_services.inference.vllm_engine.options import vllm_params
    from vllm.inputs.engine import tokens_input

    sizes = EngineOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=IN_FLIGHT)
    engine = await VllmEngine.start(model_dir, sizes)
    renderer = Renderer.of(model_dir)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    histories = [
        History((Message(role="user", content=f"{10 + n % 90}+{17 + n % 80}"),))
        for n in range(options.requests)
    ]
    rows = [
        renderer.prompt(GenerationRequest(history=h)).sequence.token_ids.tolist() for h in histories
    ]
    params = vllm_params(sampling, stop=renderer.stop_tokens(()), room=NEW_TOKENS)

    async def raw(index: int) -> int:
        outputs = engine._llm.generate(tokens_input(rows[index]), params, uuid.uuid4().hex)
        last = [output async for output in outputs][-1]
        return len(last.outputs[0].token_ids)

    rates: dict[str, list[float]] = {"raw_async_llm": [], "grpc_history": [], "grpc_token_ids": []}
    async with Channel(address) as channel:
        client = InferenceClient(channel)

        async def by_history(index: int) -> int:
            (sample,) = await client.generate(histories[index], sampling=sampling)
            return sample.sequence.num_model_tokens

        async def by_ids(index: int) -> int:
            (sample,) = await client.generate(token_ids=rows[index], sampling=sampling)
            return sample.sequence.num_model_tokens

        ways = {"raw_async_llm": raw, "grpc_history": by_history, "grpc_token_ids": by_ids}
        for way in ways.values():
            await _tokens_per_s(way, IN_FLIGHT)  # warm
        for _ in range(options.rounds):
            for name, way in ways.items():
                rates[name].append(await _tokens_per_s(way, options.requests))
    await engine.close()
    return rates


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="3m")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    prepare()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", options.size)
        process, address = _launch(model_dir)
        try:
            rates = asyncio.run(_measure(model_dir, address, options))
        finally:
            process.terminate()
            process.wait()
    medians = {name: round(float(np.median(values)), 1) for name, values in rates.items()}
    figures = {
        "benchmark": "inference_tokens",
        "size": options.size,
        "in_flight": IN_FLIGHT,
        "new_tokens": NEW_TOKENS,
        "requests": options.requests,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "tokens_per_s": medians,
        "share_of_raw": {
            name: round(value / medians["raw_async_llm"], 3) for name, value in medians.items()
        },
        "rounds": {name: [round(v, 1) for v in values] for name, values in rates.items()},
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
