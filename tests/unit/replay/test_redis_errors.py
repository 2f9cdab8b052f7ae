"""Errors of Redis arrive as refusals of the queue, whichever version of Redis words them."""

from __future__ import annotations

import pytest
import redis.asyncio
from dialoop.errors import DialoopError
from dialoop.reasons import Reason
from dialoop_services.replay.redis_store.store import map_errors
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
