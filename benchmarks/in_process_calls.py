"""Calls inside one process: the in-process transport against gRPC over a unix socket and TCP.

    python -m benchmarks.in_process_calls --rounds 5

The servicer answers at once, so the figures are those of the way alone: seconds of latency (p50)
and CPU seconds of the process for a unary call and for a streamed message (request and answer).
All ways stand at the same time in one event loop and are measured in turn, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dialoop.clients.channel import Channel, Rpc
from dialoop.clients.environment import CLOSE_SESSION
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.runtime import GrpcServer, ServerSettings, load
from dialoop_services.runtime.in_process import InProcessNetwork

NAME = "dialoop.v1.EnvironmentService"
INTERACT: Rpc[Any, Any] = Rpc(f"/{NAME}/Interact", pb.InteractRequest, pb.InteractResponse)
CLOSE = pb.CloseSessionRequest(session_id="s" * 1000)


class Echo(stubs.EnvironmentServiceServicer):
    """Answers at once."""

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        return pb.CloseSessionResponse(closed=True)

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:  # noqa: N802
        async for request in requests:
            yield pb.InteractResponse(request_id=request.request_id)


async def unary(channel: Channel, num_calls: int) -> dict[str, float]:
    seconds = []
    cpu = time.process_time()
    for _ in range(num_calls):
        begin = time.perf_counter()
        await channel.call(CLOSE_SESSION, CLOSE)
        seconds.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    return {"p50_ms": 1e3 * statistics.median(seconds), "cpu_ms": 1e3 * cpu / num_calls}


async def unary_together(channel: Channel, num_calls: int, width: int = 32) -> dict[str, float]:
    async def some() -> None:
        for _ in range(num_calls // width):
            await channel.call(CLOSE_SESSION, CLOSE)

    cpu = time.process_time()
    await asyncio.gather(*(some() for _ in range(width)))
    return {"cpu_ms": 1e3 * (time.process_time() - cpu) / (num_calls // width * width)}


async def streamed(channel: Channel, num_messages: int) -> dict[str, float]:
    async def requests() -> AsyncIterator[Any]:
        for _ in range(num_messages):
            yield pb.InteractRequest(request_id="r" * 1000)

    cpu, begin, count = time.process_time(), time.perf_counter(), 0
    async for _ in channel.exchange(INTERACT, requests()):
        count += 1
    assert count == num_messages
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"mean_ms": 1e3 * seconds / count, "cpu_ms": 1e3 * cpu / count}


async def measure(rounds: int, num_calls: int) -> dict[str, Any]:
    async with AsyncExitStack() as exits:
        ways: dict[str, Channel] = {}
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        network = InProcessNetwork()
        imitation = network.server("echo")
        imitation.add(stubs.add_EnvironmentServiceServicer_to_server, Echo(), NAME)
        await exits.enter_async_context(imitation)
        ways["imitation"] = await exits.enter_async_context(network.connect("echo"))
        import grpc
        from dialoop_services.runtime.auth import Token
        from dialoop_services.runtime.calls import Calls
        from dialoop_services.runtime.handlers import Handlers

        server = grpc.aio.server()
        handlers = Handlers(Calls(), Token(""), door="in_process")
        stubs.add_EnvironmentServiceServicer_to_server(Echo(), handlers)
        handlers.add_to(server)
        server.add_insecure_port(f"unix:{Path(folder) / 'echo.sock'}")
        await server.start()
        exits.push_async_callback(server.stop, 1)
        ways["unix"] = await exits.enter_async_context(
            Channel(f"unix:{Path(folder) / 'echo.sock'}")
        )
        tcp = GrpcServer(load(ServerSettings))
        tcp.add(stubs.add_EnvironmentServiceServicer_to_server, Echo(), NAME)
        await exits.enter_async_context(tcp)
        ways["tcp"] = await exits.enter_async_context(Channel(tcp.address))
        kinds = {"unary": unary, "unary_32": unary_together, "streamed": streamed}
        figures: dict[str, dict[str, list[dict[str, float]]]] = {
            way: {kind: [] for kind in kinds} for way in ways
        }
        for number in range(rounds + 1):  # the first warms up
            for way, channel in ways.items():
                for kind, run in kinds.items():
                    figure = await run(channel, num_calls)
                    if number:
                        figures[way][kind].append(figure)
    return {
        way: {
            kind: {name: round(statistics.median(f[name] for f in found), 4) for name in found[0]}
            for kind, found in of_way.items()
        }
        for way, of_way in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.rounds, options.calls)), indent=1))


if __name__ == "__main__":
    main()
