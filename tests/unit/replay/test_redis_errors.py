"""Errors of Redis arrive as refusals of the queue, whichever version of Redis words them."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.replay.__main__ import open_store
from dialoop_services.replay.redis_store.store import map_errors
from dialoop_services.replay.settings import ReplaySettings
from redis._parsers.base import BaseParser

OF_REDIS_6 = "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: "


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'. script: 1", Reason.STORE_FULL),
        (f"{OF_REDIS_6}-OOM command not allowed when used memory", Reason.STORE_FULL),
        ("READONLY You can't write against a read only replica.", Reason.STORE_UNAVAILABLE),
        ("MASTERDOWN Link with MASTER is down.", Reason.STORE_UNAVAILABLE),
        ("MISCONF Redis is configured to save RDB snapshots.", Reason.STORE_UNAVAILABLE),
    ],
)
async def test_an_answer_that_means_no_write_is_a_refusal(answer, reason):
    client = redis.asyncio.Redis()
    with pytest.raises(DialoopError) as caught:
        async with map_errors(client):
            raise BaseParser.parse_error(answer)
    assert caught.value.reason is reason


DENIED = (
    "DENIED Redis is running in protected mode because protected mode is enabled and no password "
    "is set for the default user. In this mode connections are only accepted from the loopback "
    "interface. If you want to connect from external computers to Redis you may adopt one of the "
    "following solutions: 1) Just disable protected mode sending the command 'CONFIG SET'."
)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (DENIED, "no password is set for the default user. Give"),
        ("WRONGPASS invalid username-password pair", "invalid username-password pair. Give"),
        ("NOPERM No permissions to run it.", "No permissions to run it. Give"),
    ],
)
async def test_a_redis_that_refuses_a_service_is_quoted_in_one_sentence(answer, sentence):
    async def refuse(_, writer):
        writer.write(f"-{answer}\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = ReplaySettings(store="redis", redis_url=f"redis://127.0.0.1:{port}/0")
        with pytest.raises(InvalidConfig) as caught:
            await open_store(settings)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert sentence in str(caught.value)
    assert "following solutions" not in str(caught.value)
