"""After an attack a service gives back the memory that it took, whatever the attack was."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from functools import partial

import grpc
import pytest

from tests.hostile.availability.attacked import (
    HEALTH,
    LIST,
    RIGHT,
    STEP,
    Service,
    call_headers,
    frame,
    many_messages,
    raw_connection,
    service,
)
from tests.hostile.availability.test_appends import APPEND
from tests.hostile.availability.test_appends import BODIES as APPENDS
from tests.hostile.availability.test_callers import BODIES, post
from tests.hostile.availability.test_strangers import FLOODS
from tests.support.waiting import PATIENCE_S

Attack = Callable[[Service], None]
MOST_LEFT = 1.1


def call(path: str, make: Callable[[], bytes], service: Service, *, right: bool = True) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(service.address, options=options) as channel:
        metadata = RIGHT if right else ()
        ended = channel.unary_unary(path).future(make(), metadata=metadata, timeout=120)
        assert ended.code() is not grpc.StatusCode.OK or path == APPEND


def send(shape: str, times: int, service: Service) -> None:
    post(service, "/v1/sessions/x/step", BODIES[shape](400_000 * times))


def flood(name: str, times: int, service: Service) -> None:
    with raw_connection(service) as own, contextlib.suppress(OSError):
        own.settimeout(1)
        own.sendall(b"".join(map(FLOODS[name], range(2000 * times))))
        own.recv(1 << 20)


def attacks_on(role: str, times: int) -> dict[str, Attack]:
    """Each attack of this folder on a queue or an environment; at full size with times=10."""
    if role == "replay":
        return {
            shape: partial(call, APPEND, partial(make, 6_400_000 * times))
            for shape, make in APPENDS.items()
        }
    many = partial(many_messages, 400_000 * times)
    return {
        **{shape: partial(send, shape, times) for shape in BODIES},
        **{name: partial(flood, name, times) for name in FLOODS},
        "a step of many messages": partial(call, STEP, many),
        "the same without a token": partial(call, STEP, many, right=False),
        "a longer message than the limit": partial(call, STEP, partial(bytes, 5 << 20)),
    }


def require_memory_back(service: Service, idle_mb: float, attack: str) -> None:
    ends = time.monotonic() + PATIENCE_S
    while service.memory_mb() > MOST_LEFT * idle_mb:
        assert time.monotonic() < ends, (attack, idle_mb, service.memory_mb())
        time.sleep(0.1)


@pytest.mark.heavy(reason="each attack at its full size, and the seconds until memory is back")
@pytest.mark.parametrize("role", ["environment", "replay"])
def test_memory_is_back_after_each_attack(role, tmp_path):
    settings = {"STORE": "memory"} if role == "replay" else {"UNREAD_S": "2"}
    with service(tmp_path, role, **settings) as own:
        small = attacks_on(role, 1)
        small[next(iter(small))](own)  # what a first call imports
        idle_mb = own.memory_mb()
        for name, attack in attacks_on(role, 10).items():
            attack(own)
            require_memory_back(own, idle_mb, name)


@pytest.mark.heavy(reason="80,000 calls of each kind")
@pytest.mark.parametrize("path", [LIST, HEALTH, "/no.such/Method", "without a path"])
def test_calls_that_are_reset_at_once_leave_nothing(path, tmp_path):
    """grpcio kept 300 bytes of each, for ever."""
    frames = b"".join(
        call_headers(2 * number + 1, path) + frame(3, 0, 2 * number + 1, struct.pack("!I", 8))
        for number in range(2000)
    )

    with service(tmp_path, UNREAD_S="2") as own:
        idle_mb = own.memory_mb()
        for _ in range(40):
            with raw_connection(own) as raw, contextlib.suppress(OSError):
                raw.settimeout(1)
                raw.sendall(frames)
                raw.recv(1 << 20)
        require_memory_back(own, idle_mb, path)
