"""One request of a caller with a token holds up nobody, whatever is in it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest

from tests.hostile.availability.attacked import (
    RIGHT,
    STEP,
    TENTH_AND_FULL,
    TOKEN,
    Service,
    many_messages,
    watching,
)
from tests.support.waiting import PATIENCE_S

MOST_ADDED_MB = 400
MESSAGES = b'{"history":{"prompt":{"messages":[%s]}}}'
IDS = b'{"tokens":{"prompt":{"values":[%s]}}}'


def repeated(item: bytes, num_bytes: int) -> bytes:
    return item + (b"," + item) * (num_bytes // (len(item) + 1))


def keys(num_bytes: int) -> bytes:
    return b",".join(b'"%x":1' % (1 << 20 | i) for i in range(num_bytes // 11))


BODIES = {
    "unknown keys": lambda size: b"{%s}" % keys(size),
    "one key again and again": lambda size: b"{%s}" % repeated(b'"k":1', size),
    "numbers for messages": lambda size: MESSAGES % repeated(b"1", size),
    "nulls for messages": lambda size: MESSAGES % repeated(b"null", size),
    "empty messages": lambda size: MESSAGES % repeated(b"{}", size),
    "messages of wrong keys": lambda size: MESSAGES % repeated(b'{"a":1}', size),
    "as many messages as may be": lambda _: MESSAGES % repeated(b'{"role":"user"}', 120_000),
    "empty lists": lambda size: MESSAGES % repeated(b"[]", size),
    "empty texts": lambda size: MESSAGES % repeated(b'""', size),
    "texts without an end": lambda size: b'"' * size,
    "escapes": lambda size: b'{"session_id":"%s"}' % (b'\\"{' * (size // 3)),
    "depth": lambda size: b"[" * size,
    "closed depth": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "a long number": lambda size: b'{"episode":%s}' % (b"9" * size),
    "token ids": lambda size: IDS % repeated(b"1", size),
    "fractions for ids": lambda size: IDS % repeated(b"1.5", size),
}


def post(service: Service, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(service.rest + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@TENTH_AND_FULL
@pytest.mark.parametrize("shape", BODIES)
def test_no_body_of_json_holds_up_others(attacked, shape, times):
    body = BODIES[shape](400_000 * times)
    assert len(body) < 4 << 20
    with watching(attacked) as cost:
        status, answer = post(attacked, "/v1/sessions/x/step", body)
    assert 400 <= status < 500, answer
    assert len(json.dumps(answer)) < 10_000
    cost.require_small(added_mb=MOST_ADDED_MB)


@TENTH_AND_FULL
def test_a_step_of_many_messages_holds_up_nobody(attacked, times):
    with (
        watching(attacked) as cost,
        grpc.insecure_channel(attacked.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(STEP)(many_messages(400_000 * times), metadata=RIGHT, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    cost.require_small(added_mb=MOST_ADDED_MB)


def test_a_longer_message_than_the_limit_is_not_received(attacked):
    options = [("grpc.max_send_message_length", -1)]
    with (
        watching(attacked) as cost,
        grpc.insecure_channel(attacked.address, options=options) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(STEP)(bytes(5 << 20), metadata=RIGHT, timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert cost.added_mb < 50
