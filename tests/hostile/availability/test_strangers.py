"""Somebody without a token holds up nobody, and fills neither memory nor log."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import socket
import struct
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.hostile.availability.attacked import (
    HEALTH,
    LIST,
    STEP,
    TENTH_AND_FULL,
    TOKEN,
    Service,
    call_headers,
    frame,
    headers,
    many_messages,
    raw_connection,
    service,
    watching,
)
from tests.support.samples.certificates import make_authority, make_certificate
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("limited")
    settings = {"OPENENV": "true", "REQUEST_HEAD_S": "1", "MAX_CONNECTION_CALLS": "7"}
    with service(folder, **settings) as own:
        yield own


@TENTH_AND_FULL
def test_a_message_without_a_token_is_not_decoded(attacked, times):
    message = many_messages(4_000_000 * times)
    options = [("grpc.max_send_message_length", -1)]
    with (
        watching(attacked) as cost,
        grpc.insecure_channel(attacked.address, options=options) as channel,
    ):
        calls = [channel.unary_unary(STEP).future(message, timeout=60) for _ in range(4)]
        codes = {call.exception().code() for call in calls}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    cost.require_small(added_mb=100)


@TENTH_AND_FULL
def test_streams_of_headers_alone_count_against_nobody(attacked, times):
    with watching(attacked) as cost, raw_connection(attacked) as own:
        for number in range(900 * times):
            own.sendall(call_headers(2 * number + 1, LIST if number % 2 else STEP))
            if number % 100 == 99:
                own.settimeout(PATIENCE_S)
                own.recv(1 << 20)
                time.sleep(0.02)
    cost.require_small(added_mb=100)


@TENTH_AND_FULL
def test_half_a_message_without_a_token_is_not_kept(attacked, times):
    promised = struct.pack("!BI", 0, 63 << 20)
    begun = frame(0, 0, 1, promised) + frame(0, 0, 1, bytes(1 << 14)) * 240  # a window of 4 MiB
    with watching(attacked) as cost, contextlib.ExitStack() as held:
        for number in range(20 * times):
            own = held.enter_context(raw_connection(attacked))
            own.sendall(call_headers(1, STEP if number % 2 else HEALTH))
            with contextlib.suppress(OSError):  # refused before all was sent
                own.sendall(begun)
        time.sleep(0.2)
    cost.require_small(added_mb=60)


@pytest.mark.parametrize("path", [LIST, HEALTH])
def test_what_is_compressed_is_not_unpacked(attacked, path):
    bomb = gzip.compress(bytes(200 << 20))
    data = struct.pack("!BI", 1, len(bomb)) + bomb
    with watching(attacked) as cost, raw_connection(attacked) as own:
        own.sendall(call_headers(1, path, (b"grpc-encoding", b"gzip")))
        for begin in range(0, len(data), 1 << 14):
            own.sendall(frame(0, 0, 1, data[begin : begin + (1 << 14)]))
        own.settimeout(PATIENCE_S)
        own.recv(1 << 16)
    assert cost.added_mb < 50


def test_health_without_a_token_is_the_services_own_whatever_was_asked(attacked):
    asked = health_pb2.HealthCheckRequest(service="no such service").SerializeToString()
    right = [("authorization", f"Bearer {TOKEN}")]
    with grpc.insecure_channel(attacked.address) as channel:
        check, watch = channel.unary_unary(HEALTH), channel.unary_stream(HEALTH[:-5] + "Watch")
        answer = health_pb2.HealthCheckResponse.FromString(check(asked, timeout=PATIENCE_S))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(asked, metadata=right, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(b"", timeout=PATIENCE_S))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_nobody_writes_into_the_log(attacked):
    """A GOAWAY with a text, and headers that gRPC's core cannot read."""
    forged = b"x\n2026-11-27 13:00:00,000 ERROR Purged the run. [service=replay run=demo]\n\x1b[31m"
    before = attacked.log.stat().st_size
    for _ in range(50):
        with raw_connection(attacked) as own:
            own.sendall(frame(7, 0, 0, struct.pack("!II", 0, 2) + forged + b"A" * 10_000))
        with raw_connection(attacked) as own:
            wrong = [
                headers(2 * i + 1, (b":status", b"zz"), (b"grpc-timeout", b"a\nb"))
                for i in range(50)
            ]
            with contextlib.suppress(OSError):
                own.sendall(b"".join(wrong))
                own.settimeout(0.01)
                own.recv(1 << 16)
    time.sleep(0.2)
    written = attacked.log.read_bytes()[before:]
    assert b"Purged" not in written
    assert len(written) < 10_000, written[:1000]


def resets(number: int) -> bytes:
    return call_headers(2 * number + 1, LIST) + frame(3, 0, 2 * number + 1, struct.pack("!I", 8))


def broken_headers(number: int) -> bytes:
    """Headers that begin, and go on and on."""
    return frame(1, 0, 1) if number == 0 else frame(9, 0, 1, b"\x00\x01a\x01b" * 100)


def calls_without_a_window(number: int) -> bytes:
    """Calls whose answers nobody may send, since their client takes no byte of them."""
    no_window = frame(4, 0, 0, struct.pack("!HI", 4, 0)) if number == 0 else b""
    return no_window + call_headers(2 * number + 1, HEALTH)


FLOODS = {
    "calls that are reset at once": resets,
    "headers without an end": broken_headers,
    "pings": lambda _: frame(6, 0, 0, bytes(8)),
    "settings": lambda _: frame(4, 0, 0, struct.pack("!HI", 4, 1 << 16)),
    "empty data": lambda number: frame(0, 0, 1) if number else call_headers(1, HEALTH),
    "calls without a window": calls_without_a_window,
    "windows of one byte": lambda _: frame(8, 0, 0, struct.pack("!I", 1)),
    "priorities": lambda number: frame(2, 0, 2 * number + 1, struct.pack("!IB", 0, 1)),
    "unknown frames": lambda _: frame(0xEE, 0, 0, bytes(1000)),
}


@TENTH_AND_FULL
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_holds_up_nobody(attacked, flood, times):
    """Some thousand frames in a second, no more than one process refuses; in all 10,000."""
    frames = b"".join(map(FLOODS[flood], range(250)))
    with watching(attacked) as cost:
        for _ in range(4 * times):
            with raw_connection(attacked) as own, contextlib.suppress(OSError):
                own.settimeout(1)
                own.sendall(frames)
                own.recv(1 << 20)
            time.sleep(0.05)
            cost.wait_for_an_answer()  # on a busy machine a process refuses fewer
    cost.require_small(added_mb=100)


def test_a_connection_that_is_not_read_is_closed(attacked):
    """Answers wait in the service until their client takes them, but not for ever."""
    with raw_connection(attacked) as own:
        own.sendall(b"".join(call_headers(2 * number + 1, HEALTH) for number in range(100)))
        time.sleep(3)  # longer than UNREAD_S: no ping was answered
        own.settimeout(PATIENCE_S)
        while own.recv(1 << 16):
            pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_handshake_of_tls_without_an_end_is_closed_in_time(tmp_path):
    own = make_certificate(tmp_path, make_authority(tmp_path), "own")
    variables = {
        "DIALOOP_TLS_CERTIFICATE": str(own.certificate),
        "DIALOOP_TLS_KEY": str(own.key),
    }
    begun = b"", b"\x16\x03\x01\x02\x00\x01"
    with service(tmp_path, variables=variables, REQUEST_HEAD_S="1") as serving:
        ports = (serving.port, serving.rest_port)
        with contextlib.ExitStack() as held:
            places = [("127.0.0.1", port) for port in ports for _ in begun]
            raw = [held.enter_context(socket.create_connection(place, 10)) for place in places]
            for connection, sent in zip(raw, begun * 2, strict=True):
                connection.sendall(sent)
            for connection in raw:  # 10 s, where uvicorn has 60
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1 << 16) == b""


def test_a_connection_has_so_many_calls_and_a_window_of_4_mib(limited):
    with raw_connection(limited) as raw, raw.makefile("rb") as reading:
        raw.settimeout(PATIENCE_S)

        def payload(kind: int) -> bytes:
            head = reading.read(9)
            assert (head[3], head[5:]) == (kind, bytes(4))
            return reading.read(int.from_bytes(head[:3], "big"))

        pairs = dict(struct.iter_unpack("!HI", payload(4)))
        assert pairs[3] == 7  # SETTINGS_MAX_CONCURRENT_STREAMS
        (added,) = struct.unpack("!I", payload(8))
        assert 65_535 + added == pairs[4] == 4 << 20  # of the connection, and of each call


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Content-Length: 0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX: "
        + b"a" * 20_000
        + b"\r\n\r\n",
    ],
    ids=["another method", "a long head"],
)
def test_an_upgrade_that_is_none_is_answered_and_closed(limited, request_):
    with socket.create_connection(("127.0.0.1", limited.rest_port), PATIENCE_S) as raw:
        raw.sendall(request_)
        answer = b""
        while part := raw.recv(1 << 16):
            answer += part
        assert answer.startswith(b"HTTP/1.1 4")
