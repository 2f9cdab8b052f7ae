"""Measure bytes, time and CPU of Generate at turns 1, 100 and 400 of a conversation.

python -m benchmarks.generate_turns > generate_turns.json

The inference service runs in a process of its own, with an engine that answers at once
(`servers/scripted_replica.py`): what is measured is the service and the client, not the model.
Every turn carries the whole conversation and its tokens. `wall_ms`, `client_cpu_ms` and
`service_cpu_ms` are of one request; `render_ms` is the template's share of the service's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.inference.rendering import Renderer

from benchmarks.environment_doors import ROOT
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import cpu_ns, processor

TURNS = (1, 100, 400)
QUESTION = Message(role="user", content="An answer of some words, as long as a short one.")


@contextmanager
def service(model_dir: Path) -> Iterator[tuple[int, str]]:
    """Run the service; yield its process id and address."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks/servers/scripted_replica.py"), str(model_dir)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("address=")), "")
        if not line:
            raise RuntimeError("the service did not start")
        yield process.pid, line.removeprefix("address=").strip()
    finally:
        process.terminate()
        process.wait()


class _Watched:
    """A channel that notes the bytes of the last call."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.bytes: dict[str, int] = {}

    async def call(self, rpc: Any, request: Any, **options: Any) -> Any:
        answer = await self._channel.call(rpc, request, **options)
        self.bytes = {"request_bytes": request.ByteSize(), "answer_bytes": answer.ByteSize()}
        return answer


async def measure(model_dir: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Play one conversation; at each turn that counts, ask several times."""
    figures: dict[str, dict[str, float]] = {}
    with service(model_dir) as (pid, address):
        async with Channel(address) as channel:
            watched = _Watched(channel)
            client = InferenceClient(watched)
            history, sequence = History((QUESTION,)), None
            for turn in range(1, max(options.turns) + 1):
                walls, ours, theirs = [], time.process_time(), cpu_ns(pid)
                repeats = options.repeats if turn in options.turns else 1
                for _ in range(repeats):
                    begun = time.perf_counter()
                    (sample,) = await client.generate(
                        history,
                        context=sequence,
                        num_context_messages=0 if sequence is None else len(history) - 1,
                        turn=turn,
                    )
                    walls.append(time.perf_counter() - begun)
                if turn in options.turns:
                    figures[str(turn)] = watched.bytes | {
                        "wall_ms": round(statistics.median(walls) * 1e3, 3),
                        "client_cpu_ms": round((time.process_time() - ours) / repeats * 1e3, 3),
                        "service_cpu_ms": round((cpu_ns(pid) - theirs) / repeats / 1e6, 3),
                    }
                added = sample.sequence
                sequence = added if sequence is None else sequence.extended_by(added)
                history = sample.history.require_full().append(QUESTION)
    return figures


def _render_ms(model_dir: Path, turns: tuple[int, ...]) -> dict[str, float]:
    """Return the CPU milliseconds of rendering a conversation of so many turns once."""
    template, times = Renderer.of(model_dir).template, {}
    for turn in turns:
        answer = Message(role="assistant", content="11111111")
        history = History((QUESTION, answer) * (turn - 1) + (QUESTION,))
        template.render(history)
        begun = time.process_time()
        for _ in range(20):
            template.render(history)
        times[str(turn)] = round((time.process_time() - begun) / 20 * 1e3, 3)
    return times


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny_model(Path(folder) / "model", seed=0)
        figures = asyncio.run(measure(model_dir, options))
        render_ms = _render_ms(model_dir, options.turns)
    context = {
        "benchmark": "generate_turns",
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "repeats": options.repeats,
        "render_ms": render_ms,
    }
    print_figures(context, figures)


if __name__ == "__main__":
    main()
