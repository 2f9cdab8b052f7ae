"""The scorer's health while its first call loads a model."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import httpx
import pytest
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.runtime.listening import bound_socket

from tests.support.waiting import PATIENCE_S


@pytest.mark.heavy(reason="starts a scorer, which imports torch in its first call")
async def test_the_first_call_does_not_stop_the_health_answer(tmp_path: Path) -> None:
    with bound_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    settings = {
        "DIALOOP_SCORER_MODEL_DIR": str(make_tiny_model(tmp_path)),
        "DIALOOP_SCORER_REST_PORT": str(port),
        "DIALOOP_SCORER_REPLAY_ADDRESS": "127.0.0.1:1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dialoop_services.scorer", env=os.environ | settings
    )
    http = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert (await http.get("/healthz")).status_code == 200
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
        body = {"token_ids": [{"values": [1, 2, 3]}]}
        first = asyncio.create_task(http.post("/v1/logprob", json=body))
        slowest, started = 0.0, time.monotonic()
        while not first.done():
            begin = time.monotonic()
            assert (await http.get("/healthz")).status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
            await asyncio.sleep(0.02)
        took = time.monotonic() - started
        assert first.result().status_code == 200, first.result().text
        assert slowest < max(1.0, took / 3), (slowest, took)
    finally:
        await http.aclose()
        process.terminate()
        await process.wait()
