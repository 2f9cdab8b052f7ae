"""One request that holds trajectories holds up nobody at the queue, whatever is in it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from dialoop.v1 import chat_pb2
from google.protobuf.wrappers_pb2 import BytesValue

from tests.hostile.availability.attacked import (
    RIGHT,
    TENTH_AND_FULL,
    Service,
    service,
    watching,
)

APPEND = "/dialoop.v1.ReplayService/AppendMembers"
MOST_WAIT_S, MOST_ADDED_MB = 1.0, 500


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("queue"), "replay", STORE="memory") as own:
        yield own


def field(number: int, content: bytes) -> bytes:
    """A field as it is serialised."""
    serialised = BytesValue(value=content).SerializeToString() or b"\n\0"
    return bytes([number << 3 | 2]) + serialised[1:]


def append(*parts: bytes) -> bytes:
    """A request with one member, whose trajectory has these parts too."""
    lease, trajectory = field(1, b"task/1/g"), b"".join((field(2, b"g"), *parts))
    return RUN + field(2, lease + field(3, trajectory))


RUN, TURN = field(1, b"r"), field(8, b"")
TEXT = field(7, field(1, chat_pb2.Message(role="user", content="x" * 900).SerializeToString()))
BODIES = {
    "empty members": lambda size: RUN + field(2, b"") * (size // 2),
    "members as many as may be": lambda _: append() + append()[len(RUN) :] * 4095,
    "empty turns": lambda size: append(TURN * (size // 2)),
    "turns as many as may be": lambda size: append(TURN * (size // 600)),
    "texts": lambda size: append(TEXT * (size // 950)),
    "unknown numbers": lambda size: RUN + b"\xf8\x01\x01" * (size // 3),
    "one long name": lambda size: append(field(1, b"x" * size)),
    "zeros": bytes,
}


@TENTH_AND_FULL
@pytest.mark.parametrize("shape", BODIES)
def test_no_append_holds_up_others(queue, shape, times):
    body = BODIES[shape](6_400_000 * times)
    assert len(body) < 64 << 20
    options = [("grpc.max_send_message_length", -1)]
    with (
        watching(queue) as cost,
        grpc.insecure_channel(queue.address, options=options) as channel,
    ):
        call = channel.unary_unary(APPEND).future(body, metadata=RIGHT, timeout=120)
        assert call.exception() is None or call.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    cost.require_small(added_mb=MOST_ADDED_MB, most_s=MOST_WAIT_S)
