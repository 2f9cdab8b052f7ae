from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load, probe
from dialoop_services.runtime.probe import SILENT, kill_if_hung, main, status_of

NAME = "dialoop.v1.EnvironmentService"


def serving() -> GrpcServer:
    # With a token: a probe knows none, and health needs none.
    server = GrpcServer(load(ServerSettings, token="secret", rest_port=0))
    servicer = stubs.EnvironmentServiceServicer()
    server.add(stubs.add_EnvironmentServiceServicer_to_server, servicer, NAME)
    return server


async def exit_code(address: str) -> int:
    return await asyncio.to_thread(main, [address])


async def test_a_serving_service_is_healthy() -> None:
    async with serving() as server:
        assert await exit_code(server.rest_address) == 0


async def test_a_service_that_reports_not_serving_is_unhealthy() -> None:
    async with serving() as server:
        await server.set_serving(False, NAME)
        assert await exit_code(server.rest_address) == 1
        assert await asyncio.to_thread(status_of, server.rest_address) == "NOT_SERVING"


async def test_what_does_not_speak_http_is_silent() -> None:
    async def muttering(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    async with await asyncio.start_server(muttering, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(status_of, f"127.0.0.1:{port}") == SILENT


async def test_a_service_that_accepts_and_says_nothing_is_silent() -> None:
    release = asyncio.Event()

    async def hanging(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    async with await asyncio.start_server(hanging, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await asyncio.to_thread(status_of, address, timeout_s=0.2) == SILENT
        release.set()


async def test_nobody_there_is_unhealthy(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await exit_code(f"127.0.0.1:{unused_tcp_port}") == 1
    assert capsys.readouterr().out == "SILENT\n"


async def test_a_probe_imports_no_package_and_costs_little(
    unused_tcp_port: int,
) -> None:
    command = [sys.executable, "-I", "-S", probe.__file__, f"127.0.0.1:{unused_tcp_port}"]
    before = os.times()
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    after = os.times()
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "SILENT\n", "")
    spent = after.children_user + after.children_system
    # By gRPC it was .75 to 1.05.
    assert spent - before.children_user - before.children_system < 0.3


def test_a_service_that_has_gone_silent_is_killed_and_one_that_starts_is_not(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as service:

        def is_killed(status: str, after_s: float) -> bool:
            return kill_if_hung(status, service.pid, after_s, folder=str(tmp_path))

        assert not is_killed(SILENT, 0.0)  # it has not answered yet
        assert not is_killed("NOT_SERVING", 0.0)
        assert not is_killed(SILENT, 600.0)
        assert service.poll() is None
        assert is_killed(SILENT, 0.0)
        assert service.wait(60) == -signal.SIGKILL
