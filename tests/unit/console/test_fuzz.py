"""Every route of the console, asked with paths, queries and bodies that are almost right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import fields
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from dialoop_ops.console.app import console_app
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.console.watched_runs import WatchedRuns
from dialoop_ops.runs.filters import Filters
from dialoop_services.runtime.access.auth import Token

from tests.unit.console.test_app import write_run

NUMBERS = ("0", "1", "-1", "1.5", "nan", "9" * 18, "9" * 30, "²", "1e9", "1-2", ">1", "<=0", "..")
TEXTS = (
    "",
    "a",
    "r",
    '"',
    "' OR 1=1 --",
    "a* NEAR b",
    "{}",
    "\0",
    "ü" * 99,
    "<b>",
    "%",
    "(",
    "x" * 999,
)
NAMES = [field.name for field in fields(Filters)]
NAMES += ["sort", "offset", "limit", "sequence", "start", "run", "name", "x", "unknown"]
READ = ["", "/choices", "/trajectories", "/metrics", "/publishes", "/queue"]
READ += [f"/trajectories/{{}}{end}" for end in ("", "/tokens", "/group", "/forks")]
ACTS = ["/requeue", "/pause", "/resume"]
BODIES = [
    b"",
    b"{}",
    b"[]",
    b"\xff",
    b'{"groups": 1}',
    b'{"group_ids": [1, null]}',
    b"[" * 20_000,
    b" " * 90_000,
]
NUM_CALLS = 600


async def call(http: httpx.AsyncClient, chance: random.Random) -> httpx.Response:
    """One call of a route by chance."""
    words = NUMBERS + TEXTS
    run = chance.choice(["a", "a", "a", "..%2fa", "%00", "b"])
    if chance.random() < 0.2:
        body, kind = chance.choice(BODIES), chance.choice(["application/json", "text/plain"])
        path = f"/api/runs/{run}{chance.choice(ACTS)}"
        return await http.post(path, content=body, headers={"content-type": kind})
    query = [(chance.choice(NAMES), chance.choice(words)) for _ in range(chance.randint(0, 3))]
    path = chance.choice(["/api/runs", "/api/curves", "/api/config"])
    if chance.random() < 0.8:
        number = quote(chance.choice(words), safe="")
        path = f"/api/runs/{run}{chance.choice(READ)}".format(number)
    return await http.get(path, params=httpx.QueryParams(query))


@pytest.mark.parametrize("seed", [1, 2])
def test_no_words_make_the_console_fail(seed: int, tmp_path: Any) -> None:
    runs = WatchedRuns([write_run(tmp_path / "a")])
    runs.indexes["a"].catch_up()
    chance, statuses = random.Random(seed), Counter[int]()

    async def ask() -> None:
        app: Any = console_app(runs, LiveRuns(), token=Token(""))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for _ in range(NUM_CALLS):
                answer = await call(http, chance)
                statuses[answer.status_code] += 1
                is_problem = answer.status_code < 400 or "reason" in answer.json()
                assert is_problem, (seed, answer.request.url, answer.text[:300])

    asyncio.run(ask())
    assert set(statuses) <= {200, 400, 404, 405, 409, 412, 413, 415, 503}, statuses
    assert statuses[200] > 50
    assert statuses[400] > 50
