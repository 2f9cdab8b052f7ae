"""Measure bytes and server CPU of a step at turns 1, 100 and 400, over every door.

python -m benchmarks.step_turns --before CHECKOUT > step_turns.json

Each checkout has its environment service in a process of its own; the client is in this one. Every
round measures both checkouts one after the other, at each door and turn; the figures are medians
of the rounds. An episode begins with the messages of the turns before, so that nobody has to play
them. Steps alone are measured: all sessions are reset first. `cpu_ms` is the CPU time of all
threads of the service for one step; bytes are those of bodies (HTTP) and messages (gRPC). Token
and idempotency are on.

Every round also measures a `grpc.aio` server that only answers, at the first turn
(`grpc_aio_echo`), and with `--openenv-python PYTHON` openenv-core's minimal environment, whose
steps have neither a token nor idempotency.

`--checks N` measures N times each, in turn, a service that asks who calls, counts calls and looks
at what is in a message, and the same process while it does none of that. `cpu_of_unchecked` is the
median of the shares of neighbours, at the first turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from google.protobuf.message import Message

from benchmarks.environment_doors import ROOT, TOKEN, Service, http, openenv_service, service
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import cpu_ns, processor
from benchmarks.servers.minimal_environment import TOGGLES_CHECKS

DOORS = ("rest_json", "rest_protobuf", "grpc_unary", "grpc_stream", "grpc_batch")
TURNS = (1, 100, 400)
STEPS = 8
TEXT = "An answer of some words, as long as a short one."
METADATA = (("authorization", f"Bearer {TOKEN}"),)

Answer = dict[str, Any] | Message
Sender = Callable[[int, str, dict[str, Any]], Awaitable[tuple[int, int, Answer]]]


@dataclass
class Cell:
    """The figures of one checkout, door and turn, one of each round."""

    cpu_ms: list[float] = field(default_factory=list)
    request_bytes: int = 0
    answer_bytes: int = 0


@asynccontextmanager
async def rest_sender(service: Service, sessions: int, *, binary: bool) -> AsyncIterator[Sender]:
    """Yield a function that sends a request over one connection for each session."""
    kind = "application/x-protobuf" if binary else "application/json"
    async with AsyncExitStack() as exits:
        connections = [
            await exits.enter_async_context(http(service.rest_address)) for _ in range(sessions)
        ]

        async def send(number: int, name: str, fields: dict[str, Any]) -> tuple[int, int, Answer]:
            path = "/v1/sessions"
            if name != "CreateSession":
                path += f"/{_id(number)}/{name.lower()}"
                fields = {key: value for key, value in fields.items() if key != "session_id"}
            message = getattr(pb, f"{name}Request")
            body = message(**fields).SerializeToString() if binary else json.dumps(fields).encode()
            answer = await connections[number].post(path, body, kind)
            parsed = (
                getattr(pb, f"{name}Response").FromString(answer) if binary else json.loads(answer)
            )
            return len(body), len(answer), parsed

        yield send


@asynccontextmanager
async def grpc_sender(service: Service, kind: str) -> AsyncIterator[Sender]:
    """Yield a function that sends a request: unary, over one stream, or in one batch of all."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = EnvironmentServiceStub(channel)
        yield {"grpc_unary": _unary, "grpc_stream": _Stream, "grpc_batch": _Batch}[kind](stub)


def _unary(stub: EnvironmentServiceStub) -> Sender:
    async def send(number: int, name: str, fields: dict[str, Any]) -> tuple[int, int, Answer]:
        request = getattr(pb, f"{name}Request")(**fields)
        answer = await getattr(stub, name)(request, metadata=METADATA)
        return request.ByteSize(), answer.ByteSize(), answer

    return send


class _Stream:
    """Sends requests over one stream, and gives each caller its answer."""

    def __init__(self, stub: EnvironmentServiceStub) -> None:
        self._outbox: asyncio.Queue[pb.InteractRequest] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._call = stub.Interact(self._requests(), metadata=METADATA)
        self._reading = asyncio.create_task(self._read())

    async def __call__(
        self, number: int, name: str, fields: dict[str, Any]
    ) -> tuple[int, int, Answer]:
        member = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        request = pb.InteractRequest(request_id=str(number), **{member: fields})
        answer = self._waiting[str(number)] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(request)
        response = await answer
        return request.ByteSize(), response.ByteSize(), getattr(response, member)

    async def _requests(self) -> AsyncIterator[pb.InteractRequest]:
        while True:
            yield await self._outbox.get()

    async def _read(self) -> None:
        async for response in self._call:
            if response.HasField("error"):
                raise RuntimeError(response.error.message)
            self._waiting.pop(response.request_id).set_result(response)


class _Batch:
    """Sends the steps of all sessions that ask at the same time in one BatchStep."""

    def __init__(self, stub: EnvironmentServiceStub) -> None:
        self._stub, self._send = stub, _unary(stub)
        self._items: list[tuple[pb.StepRequest, asyncio.Future[Any]]] = []

    async def __call__(
        self, number: int, name: str, fields: dict[str, Any]
    ) -> tuple[int, int, Answer]:
        if name != "Step":
            return await self._send(number, name, fields)
        request, answer = pb.StepRequest(**fields), asyncio.get_running_loop().create_future()
        self._items.append((request, answer))
        if len(self._items) == 1:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._flush()))
        response = await answer
        return request.ByteSize(), response.ByteSize(), response

    async def _flush(self) -> None:
        items, self._items = self._items, []
        batch = pb.BatchStepRequest(items=[request for request, _ in items])
        answers = await self._stub.BatchStep(batch, metadata=METADATA)
        for (_, waiting), item in zip(items, answers.items, strict=True):
            waiting.set_result(item.response)


def _id(number: int) -> str:
    return f"session{number}"


def _past(turn: int) -> dict[str, Any]:
    """Return the messages of an episode whose next step is that of `turn`."""
    pair = [{"role": "assistant", "content": TEXT}, {"role": "user", "content": TEXT}]
    return {"messages": {"messages": [{"role": "user", "content": "hello"}, *pair * (turn - 1)]}}


async def measure(
    service: Service, send: Sender, cell: Cell, options: argparse.Namespace, turn: int
) -> None:
    """Play episodes of some steps from that turn on, and add the CPU of one step to the cell."""
    response = {"response": {"messages": [{"role": "assistant", "content": TEXT}]}}
    spent_ns = 0

    async def reset(number: int, episode: int) -> None:
        fields = {"session_id": _id(number), "episode": episode, **_past(turn)}
        await send(number, "Reset", fields)

    async def play(number: int, episode: int) -> None:
        for index in range(STEPS):
            fields = {"session_id": _id(number), "episode": episode, "step_index": index}
            fields["history"] = response
            cell.request_bytes, cell.answer_bytes, _ = await send(number, "Step", fields)

    everyone = range(options.sessions)
    first = options.next_episode
    for episode in range(first, first + options.episodes):
        await asyncio.gather(*(reset(number, episode) for number in everyone))
        before = cpu_ns(service.pid)
        await asyncio.gather(*(play(number, episode) for number in everyone))
        spent_ns += cpu_ns(service.pid) - before
    options.next_episode += options.episodes
    steps = options.episodes * options.sessions * STEPS
    cell.cpu_ms.append(spent_ns / steps / 1e6)


async def measure_openenv(
    pid: int, address: str, cells: dict[str, Cell], options: argparse.Namespace
) -> None:
    """Play the same number of steps at openenv-core's two doors; a socket is a session."""
    posted = json.dumps({"action": {"message": TEXT}}).encode()
    sent = json.dumps({"type": "step", "data": {"message": TEXT}})

    async def post(connection: Any) -> None:
        for _ in range(STEPS):
            await connection.post("/step", posted)

    async def step(connection: Any) -> None:
        for _ in range(STEPS):
            await connection.send(sent)
            answer = json.loads(await connection.recv())
            assert answer["type"] == "observation", answer

    async with openenv_connections(address, options.sessions) as (posting, sockets):
        for is_measured in (False, True):
            for name, play, connections in (
                ("openenv_http", post, posting),
                ("openenv_websocket", step, sockets),
            ):
                before = cpu_ns(pid)
                for _ in range(options.episodes):
                    await asyncio.gather(*map(play, connections))
                steps = options.episodes * options.sessions * STEPS
                if is_measured:
                    cells[name].cpu_ms.append((cpu_ns(pid) - before) / steps / 1e6)


@contextmanager
def echo_service() -> Iterator[Service]:
    """Run a `grpc.aio` server that only answers."""
    path = Path(__file__).with_name("servers") / "grpc_echo.py"
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Service(process.pid, f"127.0.0.1:{process.stdout.readline().strip()}", "")
    finally:
        process.terminate()
        process.wait()


async def measure_echo(cell: Cell, options: argparse.Namespace) -> None:
    """Play the same steps at a server that only answers."""
    options.next_episode = 1
    with echo_service() as running:
        async with open_door(running, "grpc_unary", options.sessions) as send:
            await measure(running, send, Cell(), options, 1)
            await measure(running, send, cell, options, 1)


@asynccontextmanager
async def openenv_connections(address: str, sessions: int) -> AsyncIterator[tuple[list[Any], ...]]:
    """Yield connections to POST on, and sockets whose session has begun."""
    from websockets.asyncio.client import connect

    async with AsyncExitStack() as exits:
        posting, sockets = [], []
        for _ in range(sessions):
            posting.append(await exits.enter_async_context(http(address)))
            socket = connect(f"ws://{address}/ws", compression=None)
            sockets.append(await exits.enter_async_context(socket))
            await sockets[-1].send(json.dumps({"type": "reset", "data": {}}))
            await sockets[-1].recv()
        yield posting, sockets


@asynccontextmanager
async def open_door(service: Service, door: str, sessions: int) -> AsyncIterator[Sender]:
    """Yield the sender of a door, with its sessions created."""
    opening = (
        rest_sender(service, sessions, binary=door == "rest_protobuf")
        if door.startswith("rest")
        else grpc_sender(service, door)
    )
    async with opening as send:
        for number in range(sessions):
            fields = {"session_id": _id(number), "environment": "minimal"}
            await send(number, "CreateSession", fields)
        yield send


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every checkout, door and turn in every round."""
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    cells: dict[str, dict[str, dict[int, Cell]]] = {
        name: {door: {turn: Cell() for turn in options.turns} for door in options.doors}
        for name in checkouts
    }
    openenv = {"openenv_http": Cell(), "openenv_websocket": Cell()}
    echo = Cell()
    for _ in range(options.rounds):
        await measure_echo(echo, options)
        if options.openenv_python:
            with openenv_service(options.openenv_python) as (pid, address):
                await measure_openenv(pid, address, openenv, options)
        for door in options.doors:
            for name, root in checkouts.items():
                options.next_episode = 1
                with service(root) as running:
                    async with open_door(running, door, options.sessions) as send:
                        await measure(running, send, Cell(), options, 1)
                        for turn in options.turns:
                            await measure(running, send, cells[name][door][turn], options, turn)
    figures = {name: _figures(doors) for name, doors in cells.items()}
    figures |= _ratios(cells, options.turns)
    figures["grpc_aio_echo"] = _figures({"grpc_unary": {1: echo}})["grpc_unary"]["1"]
    if options.openenv_python:
        figures |= _beside_openenv(cells["now"], openenv, options.turns[0])
    return figures


async def measure_checks(options: argparse.Namespace) -> dict[str, Any]:
    """Return for each door what a step costs with and without checks, in one process."""
    figures = {}
    for door in options.doors:
        cells = Cell(), Cell()
        options.next_episode = 1
        with service(ROOT, {TOGGLES_CHECKS: "1"}) as running:
            async with open_door(running, door, options.sessions) as send:
                await measure(running, send, Cell(), options, 1)
                for _ in range(options.checks):
                    for cell in cells:
                        await measure(running, send, cell, options, 1)
                        os.kill(running.pid, signal.SIGUSR1)
        checked, unchecked = (cell.cpu_ms for cell in cells)
        shares = [one / other for one, other in zip(checked, unchecked, strict=True)]
        figures[door] = {
            "checked_ms": round(statistics.median(checked), 3),
            "unchecked_ms": round(statistics.median(unchecked), 3),
            "cpu_of_unchecked": round(statistics.median(shares), 3),
            "quartiles": [round(each, 3) for each in statistics.quantiles(shares)[::2]],
        }
    return figures


def _beside_openenv(
    cells: dict[str, dict[int, Cell]], openenv: dict[str, Cell], turn: int
) -> dict[str, Any]:
    """Return openenv-core's figures, and each door's CPU at the first turn as a share of them."""
    peers = {name: statistics.median(cell.cpu_ms) for name, cell in openenv.items()}
    rounds = {
        name: {"cpu_ms": round(peers[name], 3), "rounds_ms": [round(v, 3) for v in cell.cpu_ms]}
        for name, cell in openenv.items()
    }
    shares = {
        door: {
            name: round(statistics.median(turns[turn].cpu_ms) / cpu_ms, 2)
            for name, cpu_ms in peers.items()
        }
        for door, turns in cells.items()
    }
    return rounds | {"cpu_of_openenv": shares}


def _figures(doors: dict[str, dict[int, Cell]]) -> dict[str, Any]:
    return {
        door: {
            str(turn): {
                "cpu_ms": round(statistics.median(cell.cpu_ms), 3),
                "rounds_ms": [round(value, 3) for value in cell.cpu_ms],
                "request_bytes": cell.request_bytes,
                "answer_bytes": cell.answer_bytes,
            }
            for turn, cell in turns.items()
        }
        for door, turns in doors.items()
    }


def _ratios(cells: dict[str, dict[str, dict[int, Cell]]], turns: Sequence[int]) -> dict[str, Any]:
    def cpu(name: str, door: str, turn: int) -> float:
        return statistics.median(cells[name][door][turn].cpu_ms)

    growth = {d: round(cpu("now", d, turns[-1]) / cpu("now", d, turns[0]), 2) for d in cells["now"]}
    if "before" not in cells:
        return {"growth_of_cpu": growth}
    of_before = {
        door: {str(t): round(cpu("now", door, t) / cpu("before", door, t), 2) for t in turns}
        for door in cells["now"]
    }
    return {"growth_of_cpu": growth, "cpu_of_before": of_before}


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--checks", type=int, default=0, help="measure what checks cost instead")
    parser.add_argument("--openenv-python", default="", help="a python that has openenv-core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=2, help="episodes of a session and cell")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    measured = measure_checks if options.checks else compare
    figures = asyncio.run(measured(options))
    context = {
        "benchmark": "step_turns",
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "rounds": options.rounds,
        "sessions": options.sessions,
    }
    print_figures(context, figures)


if __name__ == "__main__":
    main()
