"""Measure bytes and service CPU of Generate at turns 1, 100 and 400 of a conversation.

python -m benchmarks.generate_turns --before CHECKOUT > generate_turns.json

Each checkout has its inference service in a process of its own, with an engine that answers at once
(`servers/scripted_replica.py`): what is measured is the service, not the model. The client sends as
the checkout's own client does: today what follows and the digests of what came before, in 127deda
the whole history and its tokens. Every round measures both checkouts one after the other at each
turn; figures are medians of the rounds. `cpu_ms` is the CPU time of all threads of the service for
one request. `render_ms` is the template's share of it, measured here: the whole conversation is
rendered at every turn.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from dialoop.chat import History, Message
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.v1.inference_service_pb2_grpc import InferenceServiceStub
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.inference.rendering import Renderer

from benchmarks.environment_doors import ROOT
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import cpu_ns, processor

TURNS = (1, 100, 400)
QUESTION = {"role": "user", "content": "An answer of some words, as long as a short one."}


@dataclass
class Cell:
    """The figures of one checkout and turn, one of each round."""

    cpu_ms: list[float] = field(default_factory=list)
    request_bytes: int = 0
    answer_bytes: int = 0


@contextmanager
def service(root: Path, model_dir: Path) -> Iterator[tuple[int, str]]:
    """Run the service of a checkout; yield its process id and address."""
    is_today = (root / "services" / "dialoop_services").exists()
    path = [root / "client", root / "services" if is_today else root]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks/servers/scripted_replica.py"), str(model_dir)],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, path))},
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


class _Conversation:
    """A conversation that grows by a question and an answer each turn."""

    def __init__(self, stub: InferenceServiceStub, name: str, *, by_difference: bool) -> None:
        self._stub = stub
        self._question = QUESTION | {"content": f"{name} {QUESTION['content']}"}
        self._by_difference = by_difference
        self._messages: list[Any] = []
        self._last: pb.Sample | None = None
        self._sequence: Any = None

    async def turn(self, index: int, cell: Cell | None = None) -> None:
        """Ask once; note the bytes in the cell."""
        request = self._request(index)
        answer = await self._stub.Generate(request)
        if cell is not None:
            cell.request_bytes, cell.answer_bytes = request.ByteSize(), answer.ByteSize()
        self._take(answer.samples[0])

    def _request(self, index: int) -> pb.GenerateRequest:
        request = pb.GenerateRequest(turn=index)
        if self._by_difference:
            request.keep_context = True
            request.history.prompt.messages.add(**self._question)
            if self._last is not None:
                request.known_context.CopyFrom(self._last.context)
            return request
        request.history.prompt.messages.extend(self._messages)
        request.history.prompt.messages.add(**self._question)
        if self._sequence is not None:
            request.context.CopyFrom(self._sequence)
            request.num_context_messages = len(self._messages)
        return request

    def _take(self, sample: pb.Sample) -> None:
        self._last = sample
        if self._by_difference:
            return
        self._messages = list(sample.history.full.messages)
        more: Any = sample.sequence  # in 127deda's protos
        if self._sequence is None:
            self._sequence = more
            return
        start = len(self._sequence.token_ids)
        self._sequence.token_ids.extend(more.token_ids)
        self._sequence.inference_logprobs.extend(more.inference_logprobs)
        for segment in more.segments:
            segment.start += start
            self._sequence.segments.append(segment)


async def measure(
    running: tuple[int, str], cells: dict[int, Cell], options: argparse.Namespace, *, is_now: bool
) -> None:
    """Play one conversation; add the CPU of one request around each turn to its cell."""
    pid, address = running
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        await _Conversation(stub, "first", by_difference=is_now).turn(0)
        conversations = [
            _Conversation(stub, str(i), by_difference=is_now) for i in range(options.conversations)
        ]
        for index in range(max(cells)):
            before = cpu_ns(pid)
            for conversation in conversations:
                await conversation.turn(index, cells.get(index + 1))
            if index + 1 in cells:
                spent_ms = (cpu_ns(pid) - before) / 1e6
                cells[index + 1].cpu_ms.append(spent_ms / len(conversations))


async def compare(options: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """Measure every checkout in every round."""
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    cells = {name: {turn: Cell() for turn in options.turns} for name in checkouts}
    for _ in range(options.rounds):
        for name, root in checkouts.items():
            with service(root, model_dir) as running:
                await measure(running, cells[name], options, is_now=name == "now")
    figures: dict[str, Any] = {
        name: {
            str(turn): {
                "cpu_ms": round(statistics.median(cell.cpu_ms), 3),
                "request_bytes": cell.request_bytes,
                "answer_bytes": cell.answer_bytes,
            }
            for turn, cell in turns.items()
        }
        for name, turns in cells.items()
    }
    return figures | {"render_ms": _render_ms(model_dir, options.turns)}


def _render_ms(model_dir: Path, turns: tuple[int, ...]) -> dict[str, float]:
    """Return the CPU milliseconds of rendering a conversation of so many turns once."""
    template, times = Renderer.of(model_dir).template, {}
    for turn in turns:
        answer = Message(role="assistant", content="11111111")
        history = History((Message(**QUESTION), answer) * (turn - 1) + (Message(**QUESTION),))
        template.render(history)
        begun = time.process_time()
        for _ in range(20):
            template.render(history)
        times[str(turn)] = round((time.process_time() - begun) / 20 * 1e3, 3)
    return times


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=8, help="of a round")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny_model(Path(folder) / "model", seed=0)
        figures = asyncio.run(compare(options, model_dir))
    context = {
        "benchmark": "generate_turns",
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "rounds": options.rounds,
        "conversations": options.conversations,
    }
    print_figures(context, figures)


if __name__ == "__main__":
    main()
