"""Measure steps per second of a minimal environment: REST and gRPC, beside openenv-core's server.

python -m benchmarks.environment_doors --openenv-python PATH/TO/python > doors.json

Token and validation are on. Each way has its server in a process of its own and its client in this
one; `server_cpu_ms` is the CPU time of the server for one step, which is what a free core could do.
An episode is eight steps; resets are made and not counted, though their time is. openenv-core's
HTTP keeps no session between steps, its WebSocket does. Without --openenv-python it is left out.
--before names a checkout of an earlier commit, whose service is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

ROOT = Path(__file__).parents[1]
TOKEN = "benchmark"
STEPS_PER_EPISODE = 8
MESSAGE = {"role": "assistant", "content": "hello"}
HISTORY = {"response": {"messages": [MESSAGE]}}

# Plays one session for ever; adds the seconds of each step to a list.
Player = Callable[[int, list[float]], Awaitable[None]]


@dataclass
class Service:
    """A running service."""

    pid: int
    address: str
    rest_address: str


@contextmanager
def service(root: Path, added: Mapping[str, str] = MappingProxyType({})) -> Iterator[Service]:
    """Run the environment service of a checkout, with today's layout or that of 127deda.

    `added` are variables of it; its PYTHONPATH comes before the checkout's folders.
    """
    is_today = (root / "services" / "dialoop_services").exists()
    path = [root / "client", root / "services" if is_today else root, root]
    variables = {
        "DIALOOP_TOKEN": TOKEN,
        "DIALOOP_ENVIRONMENT_REST_PORT": "0",
        "DIALOOP_ENVIRONMENT_ENVIRONMENTS": "benchmarks.servers.minimal_environment:environment",
        **added,
        "PYTHONPATH": ":".join([*filter(None, [added.get("PYTHONPATH")]), *map(str, path)]),
    }
    module = "dialoop_services.environment" if is_today else "services.environment"
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env=os.environ | variables,
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if " address=" in line), "")
        match = re.search(r"rest_address=(\S+) address=([^\s\]]+)", line)
        if match is None:
            raise RuntimeError(f"the service did not start: {line}")
        yield Service(process.pid, match[2], match[1])
    finally:
        process.terminate()
        process.wait()


@contextmanager
def openenv_service(python: str) -> Iterator[tuple[int, str]]:
    """Yield openenv-core's server: pid and address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("servers") / "openenv_echo.py"
    # It writes a traceback for every connection that a client ends.
    process = subprocess.Popen(
        [python, str(script), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(900):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class Http:
    """One keep-alive connection without a client library, so that only the server is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        """POST and read the whole answer; raise unless the status is 200."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(content.decode())
        return content


@asynccontextmanager
async def http(address: str) -> AsyncIterator[Http]:
    """Yield a connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Http(reader, writer)
    finally:
        writer.close()


def rest_player(address: str, *, binary: bool) -> Player:
    """Play sessions over REST, in JSON or protobuf."""
    kind = "application/x-protobuf" if binary else "application/json"

    def body(message: Any, fields: dict[str, Any]) -> bytes:
        return message(**fields).SerializeToString() if binary else json.dumps(fields).encode()

    async def play(number: int, took_s: list[float]) -> None:
        session = f"{kind[-4:]}{number}"
        path = f"/v1/sessions/{session}"
        async with http(address) as connection:
            fields = {"session_id": session, "environment": "minimal"}
            await connection.post("/v1/sessions", body(pb.CreateSessionRequest, fields), kind)
            for episode in range(1, 10**9):
                fields = {"episode": episode, "split": "train", "task_key": "0"}
                await connection.post(f"{path}/reset", body(pb.ResetRequest, fields), kind)
                for index in range(STEPS_PER_EPISODE):
                    fields = {"episode": episode, "step_index": index, "history": HISTORY}
                    sent = body(pb.StepRequest, fields)
                    started = time.perf_counter()
                    await connection.post(f"{path}/step", sent, kind)
                    took_s.append(time.perf_counter() - started)

    return play


def grpc_player(stub: EnvironmentServiceStub) -> Player:
    """Play sessions over unary gRPC, all on one channel."""
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    async def play(number: int, took_s: list[float]) -> None:
        session = f"g{number}"
        request = pb.CreateSessionRequest(session_id=session, environment="minimal")
        await stub.CreateSession(request, metadata=metadata)
        for episode in range(1, 10**9):
            reset = pb.ResetRequest(
                session_id=session, episode=episode, split="train", task_key="0"
            )
            await stub.Reset(reset, metadata=metadata)
            for index in range(STEPS_PER_EPISODE):
                step = pb.StepRequest(
                    session_id=session, episode=episode, step_index=index, history=HISTORY
                )
                started = time.perf_counter()
                await stub.Step(step, metadata=metadata)
                took_s.append(time.perf_counter() - started)

    return play


def openenv_http_player(address: str) -> Player:
    """Play over openenv-core's POST /step, which makes a new environment for each step."""
    body = json.dumps({"action": {"message": "hello"}}).encode()

    async def play(number: int, took_s: list[float]) -> None:
        async with http(address) as connection:
            while True:
                started = time.perf_counter()
                await connection.post("/step", body)
                took_s.append(time.perf_counter() - started)

    return play


def openenv_websocket_player(address: str) -> Player:
    """Play openenv-core's sessions, which are WebSocket connections."""
    from websockets.asyncio.client import connect

    reset = json.dumps({"type": "reset", "data": {}})
    step = json.dumps({"type": "step", "data": {"message": "hello"}})

    async def play(number: int, took_s: list[float]) -> None:
        async with connect(f"ws://{address}/ws", compression=None) as connection:
            while True:
                await connection.send(reset)
                await connection.recv()
                for _ in range(STEPS_PER_EPISODE):
                    started = time.perf_counter()
                    await connection.send(step)
                    answer = json.loads(await connection.recv())
                    took_s.append(time.perf_counter() - started)
                    if answer["type"] != "observation":
                        raise RuntimeError(str(answer))

    return play


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_player(
    player: Player, pid: int, sessions: int, seconds: float
) -> dict[str, float]:
    """Play for a second unmeasured, then for `seconds`, and return the figures."""
    took_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(player(number, took_s)) for number in range(sessions)]
        await asyncio.sleep(1.0)
        took_s.clear()
        started, cpu_before = time.perf_counter(), cpu_s(pid)
        await asyncio.sleep(seconds)
        wall_s, cpu = time.perf_counter() - started, cpu_s(pid) - cpu_before
        sorted_s = sorted(took_s)
        for task in playing:
            task.cancel()
    return {
        "steps_per_s": round(len(sorted_s) / wall_s, 1),
        "p50_ms": round(sorted_s[len(sorted_s) // 2] * 1e3, 2),
        "p99_ms": round(sorted_s[int(len(sorted_s) * 0.99)] * 1e3, 2),
        "server_cpu_ms": round(cpu / len(sorted_s) * 1e3, 3),
        "server_cores": round(cpu / wall_s, 2),
    }


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, one after the other, in every round."""
    rounds: dict[str, list[dict[str, float]]] = {}

    async def take(name: str, player: Player, pid: int) -> None:
        figures = await measure_player(player, pid, options.sessions, options.seconds)
        rounds.setdefault(name, []).append(figures)

    checkouts = {"": ROOT} | ({"before_": options.before.resolve()} if options.before else {})
    for _ in range(options.rounds):
        for prefix, root in checkouts.items():
            with service(root) as running:
                for kind, binary in (("json", False), ("protobuf", True)):
                    player = rest_player(running.rest_address, binary=binary)
                    await take(f"{prefix}rest_{kind}", player, running.pid)
                async with grpc.aio.insecure_channel(running.address) as channel:
                    player = grpc_player(EnvironmentServiceStub(channel))
                    await take(f"{prefix}grpc_unary", player, running.pid)
        if options.openenv_python:
            with openenv_service(options.openenv_python) as (pid, address):
                await take("openenv_http", openenv_http_player(address), pid)
                await take("openenv_websocket", openenv_websocket_player(address), pid)
    best = {n: max(figures, key=lambda f: f["steps_per_s"]) for n, figures in rounds.items()}
    medians = {
        name: {key: statistics.median(f[key] for f in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }
    return {"median": medians, "best": best, "rounds": rounds}


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openenv-python", default="", help="a python that has openenv-core")
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    figures = asyncio.run(compare(options))
    context = {
        "benchmark": "environment_doors",
        "sessions": options.sessions,
        "seconds": options.seconds,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "openenv": "run" if options.openenv_python else "not run",
    }
    print_figures(context, figures)


if __name__ == "__main__":
    main()
