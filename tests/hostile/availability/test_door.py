"""Strangers at the door of the containers: the real proxy, with infra/docker/door.cfg.

Its addresses are loopback's, and some of its numbers smaller, so that the tests end sooner.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import socket
import ssl
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from dialoop_services.runtime.probe import status_of

from tests.hostile.availability.attacked import (
    LIST,
    MOST_TIMES,
    MOST_WAIT_S,
    PREFACE,
    RIGHT,
    STEP,
    Cost,
    Service,
    call_headers,
    frame,
    p99,
    service,
    watching,
)
from tests.support.containers import ROOT, targets
from tests.support.samples.certificates import make_authority, make_certificate
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")

CONFIG = ROOT / "infra" / "docker" / "door.cfg"
VARIABLES = targets()["door"].variables
SHIFT = 10_000  # between a service's port and the door's for strangers
MOST = int(VARIABLES["ADDRESS_CONNECTIONS"])
MOST_NEW = int(VARIABLES["ADDRESS_NEW_CONNECTIONS"])
ATTACKER = "127.0.0.2"
CONTAINERS = "127.0.0.9"
"""Where the job's own containers come in."""


@dataclass(frozen=True)
class Door:
    """The proxy before a service."""

    process: subprocess.Popen[bytes]
    own: Service
    """The service itself."""
    outside: Service
    """The same as strangers see it."""
    inside: Service
    """The same as the job's own containers see it."""
    held: contextlib.ExitStack
    """Strangers' connections, which close with the door."""

    def connect(self, *, rest: bool = False, at: str = ATTACKER) -> socket.socket:
        """Open a stranger's connection, which the door may close at once."""
        port = self.outside.rest_port if rest else self.outside.port
        place = ("127.0.0.1", port)
        opened = socket.create_connection(place, PATIENCE_S, source_address=(at, 0))
        return self.held.enter_context(opened)

    def connect_many(
        self, number: int, sent: bytes = b"", *, rest: bool = False, at: str = ATTACKER
    ) -> list[socket.socket]:
        """Open so many connections that send the same; return those that the door leaves open.

        The system takes connections before the door does, which closes what is too many.
        """
        opened = []
        for _ in range(number):
            with contextlib.suppress(ConnectionError):
                one = self.connect(rest=rest, at=at)
                opened.append(one)
                one.sendall(sent)
        ends = time.monotonic() + PATIENCE_S
        while len(opened := [one for one in opened if not is_closed(one)]) > MOST:
            assert time.monotonic() < ends
            time.sleep(0.05)
        return opened

    def answers(self, at: str = "127.0.0.3") -> bool:
        """Whether a new connection from an address gets an answer of REST."""
        with contextlib.suppress(ConnectionError), self.connect(rest=True, at=at) as one:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return one.recv(100).startswith(b"HTTP/1.1 200")
        return False


def is_closed(connection: socket.socket, *, within_s: float = 0.0) -> bool:
    """Whether the other end has closed it, after whatever it sent; then this end closes too."""
    connection.settimeout(within_s)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
    connection.close()
    return True


@contextlib.contextmanager
def door(folder: Path, own: Service, *changes: tuple[str, str]) -> Iterator[Door]:
    """Start the proxy before a service, with these changes of its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        health = free.getsockname()[1]
    text = CONFIG.read_text("utf-8")
    ports = (own.port, own.rest_port)
    shift = SHIFT if own.port + 2 * SHIFT < 1 << 16 else -SHIFT
    published = [port + shift for port in ports]
    changes = (
        (
            "door.work:17001-17005,door.work:18001-18005",
            ",".join(f"127.0.0.1:{port}" for port in published),
        ),
        ("dst_port 17001 18001", f"dst_port {published[0]} {published[1]}"),
        ("door.work:7001,door.work:8001", ",".join(f"{CONTAINERS}:{port}" for port in ports)),
        ("door.sandbox:7002", f"{ATTACKER}:{own.port}"),
        ("127.0.0.1:8000", f"127.0.0.1:{health}"),
        *changes,
    )
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = re.sub(r"^(  server \w+) \w+", r"\1 127.0.0.1", text, flags=re.MULTILINE)
    text = text.replace(f":{-SHIFT}", f":{-shift:+d}")
    (folder / "door.cfg").write_text(text)
    program = shutil.which("haproxy") or ""
    process = subprocess.Popen([program, "-q", "-db", "-f", folder / "door.cfg"], env=VARIABLES)
    outside = replace(own, port=published[0], rest_port=published[1])
    try:
        ends = time.monotonic() + PATIENCE_S
        while status_of(f"127.0.0.1:{health}") != "SERVING":
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.02)
        with contextlib.ExitStack() as held:
            yield Door(process, own, outside, replace(own, host=CONTAINERS), held)
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def require_small(cost: Cost, *, added_mb: float) -> None:
    """Of a hundred of another client's calls 99 waited hardly longer than they do alone."""
    most_s = max(MOST_WAIT_S, MOST_TIMES * p99(cost.alone_s))
    assert p99([waited_s for waited_s, _ in cost.waits_s]) <= most_s, cost
    assert cost.added_mb < added_mb


SOON = (("inspect-delay 10s", "inspect-delay 1s"), ("tcp-ut 60s", "tcp-ut 1s"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("own")
    with service(folder, UNREAD_S="2", REQUEST_HEAD_S="1") as own:
        yield own


@pytest.fixture
def closed(own: Service, tmp_path: Path) -> Iterator[Door]:
    with door(tmp_path, own, *SOON) as closed:
        yield closed


def files_of(process: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def test_silent_connections_never_reach_the_service(closed):
    before = files_of(closed.own.process)
    with watching(closed.outside) as cost:
        opened = closed.connect_many(2000)
        assert files_of(closed.own.process) < before + 20
        assert all(is_closed(one, within_s=PATIENCE_S) for one in opened)
    require_small(cost, added_mb=20)


SETTINGS = frame(4, 0, 0)
HALF_MESSAGE = frame(0, 0, 1, struct.pack("!BI", 0, 63 << 20)) + frame(0, 0, 1, bytes(1 << 14)) * 8
ENDLESS = {
    "a head of REST": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: ", True),
    "a preface": (PREFACE[:10], False),
    "headers of a call": (PREFACE + SETTINGS + frame(1, 0, 1, b"\x00\x01a\x01b"), False),
    "a message of a call": (PREFACE + SETTINGS + call_headers(1, STEP) + HALF_MESSAGE, False),
    "a connection without a call": (PREFACE + SETTINGS, False),
}


@pytest.mark.parametrize("begun", ENDLESS)
def test_what_has_no_end_is_closed_in_time_and_fills_nothing(closed, begun):
    sent, rest = ENDLESS[begun]
    with watching(closed.outside) as cost:
        opened = closed.connect_many(2000, sent, rest=rest)
        assert closed.answers()
        assert all(is_closed(one, within_s=PATIENCE_S) for one in opened)
    require_small(cost, added_mb=60)


def test_who_takes_no_answers_is_closed(closed):
    """Each asks for a megabyte that needs no token, four times, and reads nothing."""
    ask = b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: a\r\n\r\n" * 4
    before = files_of(closed.own.process)
    with watching(closed.outside) as cost:
        for _ in range(number := 20):
            closed.connect(rest=True).sendall(ask)
        deadline = time.monotonic() + PATIENCE_S
        while files_of(closed.own.process) < before + number // 2:
            assert time.monotonic() < deadline
        while files_of(closed.own.process) > before + 5:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    require_small(cost, added_mb=200)


def test_an_address_opens_so_many_connections_and_others_go_on(closed):
    began, answered = time.monotonic(), 0
    with watching(closed.outside) as cost:
        while time.monotonic() < began + 4:
            answered += closed.answers(ATTACKER)
        assert closed.answers()
    assert 0 < answered <= MOST_NEW
    require_small(cost, added_mb=60)


def test_many_addresses_take_the_door_and_leave_the_service_to_the_jobs_own(own, tmp_path):
    few = ("environment:-10000 maxconn 1536", "environment:-10000 maxconn 20")
    with door(tmp_path, own, *SOON, few) as closed, watching(closed.inside) as cost:
        before = files_of(own.process)
        for number in range(2, 100):
            closed.connect_many(2, PREFACE + SETTINGS, at=f"127.0.1.{number}")
        time.sleep(0.5)
        assert before + 15 < files_of(own.process) <= before + 20
    require_small(cost, added_mb=60)


def test_answers_and_refusals_come_through_as_they_are(closed):
    for path in ("/openapi.json", "/healthz"):
        answers = []
        for at in (closed.own, closed.outside, closed.inside):
            with urllib.request.urlopen(at.rest + path, timeout=PATIENCE_S) as answer:
                answers.append((answer.status, answer.read()))
        assert answers[0] == answers[1] == answers[2]
    for at in (closed.outside, closed.inside):
        with grpc.insecure_channel(at.address) as channel:
            assert channel.unary_unary(LIST)(b"", metadata=RIGHT, timeout=PATIENCE_S)
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(LIST)(b"", timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_mutual_tls_passes_the_door(tmp_path):
    authority = make_authority(tmp_path)
    mine, theirs = (make_certificate(tmp_path, authority, name) for name in ("mine", "theirs"))
    variables = {
        "DIALOOP_TLS_CERTIFICATE": str(mine.certificate),
        "DIALOOP_TLS_KEY": str(mine.key),
        "DIALOOP_TLS_CA": str(authority.certificate),
        "DIALOOP_TLS_MUTUAL": "true",
    }
    root = authority.certificate.read_bytes()
    shown = (theirs.key.read_bytes(), theirs.certificate.read_bytes())
    with service(tmp_path, variables=variables) as own, door(tmp_path, own) as closed:
        with grpc.secure_channel(
            closed.outside.address, grpc.ssl_channel_credentials(root, *shown)
        ) as channel:
            assert channel.unary_unary(LIST)(b"", metadata=RIGHT, timeout=PATIENCE_S)
        with (
            grpc.secure_channel(
                closed.outside.address, grpc.ssl_channel_credentials(root)
            ) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(LIST)(b"", metadata=RIGHT, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        context = ssl.create_default_context(cafile=str(authority.certificate))
        context.load_cert_chain(theirs.certificate, theirs.key)
        url = f"https://127.0.0.1:{closed.outside.rest_port}/healthz"
        with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as answer:
            assert answer.status == 200


def test_without_its_service_the_door_stays_and_closes_what_comes(own, tmp_path):
    gone = replace(own, port=1, rest_port=2)
    with door(tmp_path, gone) as closed:
        [one] = closed.connect_many(1, PREFACE) or [closed.connect()]
        assert is_closed(one, within_s=PATIENCE_S)
