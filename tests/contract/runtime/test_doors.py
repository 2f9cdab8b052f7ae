"""What a stranger can do at a service's doors without sending one right call."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from dialoop_services.hosting import GrpcServer
from dialoop_services.rest.connections import MAX_HEAD_BYTES
from dialoop_services.runtime.listening import ConnectionLimits
from grpc_status import rpc_status

from tests.support.rest_world import http_of, refusal, service
from tests.support.waiting import PATIENCE_S

GARBAGE = (b"\xff\xff\xff", b"\x0a\x05a", b"\x0a\x02\xff\xfe", b"\x07" * 40)


@asynccontextmanager
async def connection(
    server: GrpcServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = server.rest_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and reason of the problem document after which the connection is closed."""
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["reason"]


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return not await reader.read()
    except ConnectionError:
        return True


async def test_garbage_over_grpc_is_an_argument_error_and_leaves_no_traceback(caplog):
    async with (
        service("environment") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        base = "/dialoop.v1.EnvironmentService/"
        for garbage in GARBAGE:
            calls = [
                channel.unary_unary(f"{base}Step")(garbage),
                channel.stream_stream(f"{base}Interact")(iter([garbage])).read(),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert b"INVALID_PROTOBUF" in rpc_status.from_call(caught.value).details[0].value
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_garbage_over_rest_is_an_argument_error(caplog):
    async with service("environment") as server, http_of(server) as http:
        for garbage in GARBAGE:
            for kind in ("application/json", "application/x-protobuf"):
                answer = await http.post(
                    "/v1/sessions/s/step", content=garbage, headers={"content-type": kind}
                )
                assert answer.status_code == 400, (garbage, kind)
            async with connection(server) as (reader, writer):
                writer.write(garbage + b"\r\n\r\n")
                assert await answer_of(reader) == (400, "INVALID_HTTP")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_head_that_does_not_come_and_one_without_end_are_refused():
    async with service("environment", request_head_s=0.2) as server:
        for begin in (b"", b"GET /healthz HTTP/1.1\r\nhost: "):
            async with connection(server) as (reader, writer):
                writer.write(begin)
                assert await answer_of(reader) == (408, "REQUEST_TOO_SLOW")
        async with connection(server) as (reader, writer):
            head = b"GET /healthz HTTP/1.1\r\nx: "
            writer.write(head.ljust(MAX_HEAD_BYTES + 1, b"a"))
            assert await answer_of(reader) == (431, "MESSAGE_TOO_LARGE")
        async with connection(server) as (reader, writer):
            for _ in range(2):  # between requests nothing is due
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert b"ALIVE" in await reader.readuntil(b"}")
                await asyncio.sleep(0.3)


@pytest.mark.parametrize("num_reads", [1, 2])
async def test_nothing_of_a_head_above_the_limit_is_served(num_reads):
    request = b"GET /v1/environments HTTP/1.1\r\nhost: localhost\r\nx: "
    request = request.ljust(MAX_HEAD_BYTES, b"a") + b"\r\n\r\n"
    async with service("environment") as server, http_of(server) as http:
        async with connection(server) as (reader, writer):
            half = len(request) // num_reads
            for begin in range(0, len(request), half):
                writer.write(request[begin : begin + half])
                await asyncio.sleep(0.1)  # else both halves would come in one read
            assert await answer_of(reader) == (431, "MESSAGE_TOO_LARGE")
        counted = (await http.get("/metrics")).text
        assert "ListEnvironments" not in counted
        assert (await http.get("/v1/environments")).status_code == 200
        assert "ListEnvironments" in (await http.get("/metrics")).text


def post(size: int, connection: bytes = b"close") -> bytes:
    return (
        b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\nconnection: %s\r\n"
        b"content-length: %d\r\n\r\n" % (connection, size)
    )


@pytest.mark.parametrize("begin", [b"", b"{"])
async def test_a_body_that_does_not_come_is_refused(begin):
    async with (
        service("environment", request_body_s=0.2) as server,
        connection(server) as (reader, writer),
    ):
        writer.write(post(100) + begin)
        assert await answer_of(reader) == (408, "REQUEST_TOO_SLOW")


async def test_unfinished_bodies_hold_so_much_together_and_then_nothing():
    async with service("environment", max_pending_bytes=300_000) as server:
        async with connection(server) as (_, first), connection(server) as (reader, second):
            first.write(post(1 << 20) + b" " * 200_000)
            await first.drain()
            async with http_of(server) as http:
                assert (await http.get("/healthz")).status_code == 200
            second.write(post(1 << 20, b"keep-alive") + b" " * 200_000)
            async with asyncio.timeout(PATIENCE_S):
                assert b" 429 " in await reader.readline()
        async with http_of(server) as http:
            async with asyncio.timeout(PATIENCE_S):
                while True:  # until the server has seen that the others are gone
                    answer = await http.post("/v1/sessions", content=b" " * 200_000 + b"{")
                    if answer.status_code != 429:
                        break
            assert refusal(answer) == (400, "INVALID_JSON")


async def test_idle_connections_make_room_and_busy_ones_stay():
    async with (
        service("environment", max_connections=3) as server,
        connection(server) as (busy_reader, busy),
        connection(server) as (idle, _),
    ):
        busy.write(post(100) + b"{")
        await asyncio.sleep(0.05)
        async with connection(server) as (third, _), http_of(server) as http:
            await asyncio.sleep(0.05)
            assert (await http.get("/healthz")).status_code == 200
            assert await is_closed(idle)
            assert not third.at_eof()
        busy.write(b" " * 99)
        assert b"400 Bad Request" in await busy_reader.readline()


async def test_where_every_connection_is_at_work_the_next_is_refused():
    async with (
        service("environment", max_connections=1) as server,
        connection(server) as (_, busy),
    ):
        busy.write(post(100) + b"{")
        await asyncio.sleep(0.05)
        async with connection(server) as (reader, _):
            assert await answer_of(reader) == (429, "CAPACITY")


async def test_grpc_takes_so_many_connections():
    async with service("environment", max_connections=2) as server:
        host, _, port = server.address.rpartition(":")
        writers = []
        closed = 0
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    closed += not await reader.read(1)
            except ConnectionError:
                closed += 1
        assert closed == 2
        for writer in writers:
            writer.close()


def test_connections_stay_within_the_descriptors_of_the_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert ConnectionLimits().within_descriptors().max_connections == 50
        assert ConnectionLimits(max_connections=7).within_descriptors().max_connections == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SERVICE = """
import asyncio, sys
from dialoop_services.runtime.process import run
from tests.support.rest_world import service

async def serve():
    async with service("environment") as server:
        print(server.rest_address, flush=True)
        await server.wait_until_stopped()

run(serve, name="environment")
"""


@contextmanager
def service_with_descriptors(limit: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def test_a_service_with_few_descriptors_answers_and_writes_little():
    with service_with_descriptors(200) as (address, process):
        host, _, port = address.rpartition(":")
        writers = []
        for _ in range(400):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"ALIVE" in await reader.read()
        for other in [*writers, writer]:
            other.close()
        process.terminate()
        _, errors = await asyncio.to_thread(process.communicate)
    assert len(errors) < 20_000, errors[:2000]
