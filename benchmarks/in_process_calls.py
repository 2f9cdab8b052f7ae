"""Measure a call between services of one process: our transport, a unix socket, TCP.

    python -m benchmarks.in_process_calls --rounds 5

The servicer answers at once, so the figures are those of the transport alone. Every way makes unary
calls and streams messages (a request of 1 kB and its answer), in turn with the others, round by
round, in one event loop. `p50_ms` is the median latency of unary calls one after the other,
`mean_ms` the time a streamed message, `cpu_ms` the process's CPU for one of them. All figures are
medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Channel, Rpc
from dialoop.clients.environment import CLOSE_SESSION
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.runtime import GrpcServer, ServerSettings, load
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import Calls
from dialoop_services.runtime.grpc_door import GrpcDoor
from dialoop_services.runtime.handlers import Handlers
from dialoop_services.runtime.in_process import InProcessNetwork

from benchmarks.servers.figures import print_figures

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

SERVICE = "dialoop.v1.EnvironmentService"
INTERACT: Rpc[Any, Any] = Rpc(f"/{SERVICE}/Interact", pb.InteractRequest, pb.InteractResponse)
TEXT = "x" * 1000


class Echo(stubs.EnvironmentServiceServicer):
    """A servicer that answers at once."""

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        """Answer a unary call."""
        return pb.CloseSessionResponse(closed=True)

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:  # noqa: N802
        """Answer every message of a stream."""
        async for request in requests:
            yield pb.InteractResponse(request_id=request.request_id)


async def unary(channel: Channel, num_calls: int) -> dict[str, float]:
    request, seconds = pb.CloseSessionRequest(session_id=TEXT), []
    cpu = time.process_time()
    for _ in range(num_calls):
        begin = time.perf_counter()
        await channel.call(CLOSE_SESSION, request)
        seconds.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    return {"p50_ms": 1e3 * statistics.median(seconds), "cpu_ms": 1e3 * cpu / num_calls}


async def stream_calls(channel: Channel, num_calls: int) -> dict[str, float]:
    async def requests() -> AsyncIterator[pb.InteractRequest]:
        for _ in range(num_calls):
            yield pb.InteractRequest(request_id=TEXT)

    cpu, begin = time.process_time(), time.perf_counter()
    num_answers = len([answer async for answer in channel.exchange(INTERACT, requests())])
    assert num_answers == num_calls
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"mean_ms": 1e3 * seconds / num_calls, "cpu_ms": 1e3 * cpu / num_calls}


async def ways(exits: AsyncExitStack) -> Mapping[str, Channel]:
    """Yield a channel to an Echo of its own by each way."""
    register = stubs.add_EnvironmentServiceServicer_to_server
    network = InProcessNetwork()
    inside, tcp = network.server("echo"), GrpcServer(load(ServerSettings))
    for server in (inside, tcp):
        server.add(register, Echo(), SERVICE)
        await exits.enter_async_context(server)
    handlers = Handlers(Calls(), Token(""))
    register(Echo(), handlers)
    folder = exits.enter_context(tempfile.TemporaryDirectory())
    unix, address = GrpcDoor(handlers.find, ()), f"unix:{folder}/echo.sock"
    unix.listen(address, None)
    unix.open()
    exits.push_async_callback(unix.close, 1)
    channels = {"in_process": network.connect("echo")}
    channels |= {"unix": Channel(address), "tcp": Channel(tcp.address)}
    for channel in channels.values():
        await exits.enter_async_context(channel)
    return channels


async def measure(rounds: int, num_calls: int) -> dict[str, Any]:
    figures: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    async with AsyncExitStack() as exits:
        channels = await ways(exits)
        for _ in range(rounds + 1):
            for way, channel in channels.items():
                figures[way, "unary"].append(await unary(channel, num_calls))
                figures[way, "streamed"].append(await stream_calls(channel, num_calls))
    return {
        f"{way}_{kind}_{name}": round(statistics.median(f[name] for f in by_round[1:]), 4)
        for (way, kind), by_round in figures.items()  # the first round warms up
        for name in by_round[0]
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.rounds, options.calls))
    print_figures({"benchmark": "in_process_calls", **vars(options)}, figures)


if __name__ == "__main__":
    main()
