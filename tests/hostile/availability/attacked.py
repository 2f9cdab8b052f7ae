"""A real environment service that is attacked, what it costs it, and frames of HTTP/2 by hand."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import grpc
import pytest
from dialoop.v1 import chat_pb2
from dialoop.v1 import environment_service_pb2 as pb

from tests.support.waiting import PATIENCE_S

TOKEN = "own"
RIGHT = (("authorization", f"Bearer {TOKEN}"),)
LIST = "/dialoop.v1.EnvironmentService/ListEnvironments"
STEP = "/dialoop.v1.EnvironmentService/Step"
STATS = "/dialoop.v1.ReplayService/GetStats"
HEALTH = "/grpc.health.v1.Health/Check"
MOST_WAIT_S, MOST_TIMES = 0.25, 5
"""What an attack may make others wait at the most: so long, or so many times as long as else."""
FULL_SIZE = pytest.param(10, marks=pytest.mark.heavy(reason="an attack at its full size"))
TENTH_AND_FULL = pytest.mark.parametrize("times", [1, FULL_SIZE])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Service:
    """A process, and where it listens."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    rest_port: int
    asked: tuple[str, bytes] = (LIST, b"")
    """What another client calls all the while."""
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def rest(self) -> str:
        return f"http://{self.host}:{self.rest_port}"

    def cpu_s(self) -> float:
        """Return the seconds that the process has computed."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


@contextlib.contextmanager
def service(
    folder: Path,
    role: str = "environment",
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    **settings: str,
) -> Iterator[Service]:
    """Start a service with a token, its own settings and variables of all; end it."""
    log = folder / "service.log"
    settings |= {"PORT": "0", "REST_PORT": "0"}
    own = {f"DIALOOP_{role.upper()}_{name}": value for name, value in settings.items()}
    others = {k: v for k, v in os.environ.items() if not k.startswith(("DIALOOP", "GRPC"))}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", f"dialoop_services.{role}"],
            env={**others, "DIALOOP_TOKEN": TOKEN, **variables, **own},
            cwd=folder,
            stdout=file,
            stderr=file,
        )
    try:
        ends = time.monotonic() + 4 * PATIENCE_S
        while "Serving." not in (text := log.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < ends, text
            time.sleep(0.05)
        places = dict(re.findall(r"(\w*address)=127\.0\.0\.1:(\d+)", text))
        asked = (STATS, b"\n\x01r") if role == "replay" else (LIST, b"")
        yield Service(process, log, int(places["address"]), int(places["rest_address"]), asked)
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@dataclass
class Cost:
    """What an attack cost: how long another client's calls took, and memory in MB."""

    idle_mb: float
    alone_s: list[float] = field(default_factory=list)
    waits_s: list[tuple[float, float]] = field(default_factory=list)
    """How long each call took, and what the service computed meanwhile: all that is its fault."""
    peak_mb: float = 0.0

    @property
    def added_mb(self) -> float:
        return self.peak_mb - self.idle_mb

    def wait_for_an_answer(self) -> None:
        """Wait until another call of the client has been answered."""
        before, ends = len(self.waits_s), time.monotonic() + PATIENCE_S
        while len(self.waits_s) == before and time.monotonic() < ends:
            time.sleep(0.01)

    def require_small(self, *, added_mb: float, most_s: float = MOST_WAIT_S) -> None:
        """Others waited hardly longer than they do alone, and memory grew by less than that.

        On a machine that is busy with something else they wait, while the service computes little.
        """
        most = max(most_s, MOST_TIMES * p99(self.alone_s))
        assert max(map(min, self.waits_s), default=0) <= most, self
        assert self.added_mb < added_mb


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@contextlib.contextmanager
def watching(service: Service) -> Iterator[Cost]:
    """Let another client call with the token all the while; it has to get its answers."""
    cost, stop, failures = Cost(service.memory_mb()), threading.Event(), []

    def call() -> None:
        with grpc.insecure_channel(service.address) as channel:
            path, request = service.asked
            ask = channel.unary_unary(path)
            while not stop.wait(0.01):
                started, before_s = time.perf_counter(), service.cpu_s()
                try:
                    ask(request, metadata=RIGHT, timeout=PATIENCE_S)
                except grpc.RpcError as error:
                    failures.append(error)
                    return
                waited_s = time.perf_counter() - started
                cost.waits_s.append((waited_s, service.cpu_s() - before_s))
                cost.peak_mb = max(cost.peak_mb, service.memory_mb())

    caller = threading.Thread(target=call)
    caller.start()
    while len(cost.waits_s) < 20 and caller.is_alive():
        time.sleep(0.01)
    alone, cost.waits_s = cost.waits_s, []
    cost.alone_s = [waited_s for waited_s, _ in alone]
    try:
        yield cost
        time.sleep(0.1)
    finally:
        stop.set()
        caller.join()
    assert not failures, failures


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return (
        struct.pack("!I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack("!I", stream)
        + payload
    )


def headers(stream: int, *pairs: tuple[bytes, bytes]) -> bytes:
    """Return the frame of headers that are spelled out one by one."""
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs
    )
    return frame(1, 4, stream, block)


def call_headers(stream: int, path: str, *more: tuple[bytes, bytes]) -> bytes:
    """Return the headers that begin a call without a token."""
    return headers(
        stream,
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"here"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )


@contextlib.contextmanager
def raw_connection(service: Service) -> Iterator[socket.socket]:
    """Open a connection that has sent HTTP/2's preface."""
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as own:
        own.sendall(PREFACE + frame(4, 0, 0))
        yield own


def many_messages(num_bytes: int) -> bytes:
    """A Step whose history holds as many empty messages as fit."""
    empty = chat_pb2.History(messages=[chat_pb2.Message()]).SerializeToString()
    history = chat_pb2.History.FromString(empty * (num_bytes // len(empty)))
    request = pb.StepRequest(session_id="x")
    request.history.response.CopyFrom(history)
    return request.SerializeToString()
