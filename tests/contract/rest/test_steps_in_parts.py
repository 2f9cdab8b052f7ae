"""A step is answered alike whether its request came whole or in parts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop_services.environment.serving import serving_on
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime.logs import _fields

from tests.support.rest_world import http_of, settings_of

TOKEN = "right"
RESET = {"episode": 1, "split": "train", "task_key": "35+40"}
ANSWER = {"response": {"messages": [{"role": "assistant", "content": "7"}]}}


def request(
    *,
    path: str,
    body: dict[str, Any] | bytes,
    token: str = TOKEN,
    kind: str = "application/json",
    more: str = "",
) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {token}\r\n"
        f"content-type: {kind}\r\ncontent-length: {len(content)}\r\n{more}\r\n"
    )
    return head.encode() + content


async def ask(address: str, *parts: bytes) -> tuple[str, dict[str, str], Any]:
    """Return status, headers but the date, and document of a request that is sent in parts."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name: text for name, _, text in (line.partition(": ") for line in lines)}
        headers.pop("date")
        document = json.loads(await reader.readexactly(int(headers["content-length"])))
    finally:
        writer.close()
    return status, headers, document


@asynccontextmanager
async def environments() -> AsyncIterator[tuple[GrpcServer, httpx.AsyncClient]]:
    """Serve an environment with tools and rewards."""
    settings: Any = settings_of("environment", rest_port=0, drain_s=1, token=TOKEN)
    server = GrpcServer(settings)
    async with (
        serving_on(server, settings, Catalogue([arithmetic()])),
        http_of(server, TOKEN) as http,
    ):
        yield server, http


STEP = {"episode": 1, "step_index": 0, "history": ANSWER}
OTHER = STEP | {"history": {"response": {"messages": []}}}
# What differs from a plain step, in this order.
STEPS: dict[str, dict[str, Any]] = {
    "a step": {},
    "a retry": {},
    "another answer to it": {"body": OTHER},
    "no such session": {"path": "/v1/sessions/gone/step"},
    "another session in the body": {"body": STEP | {"session_id": "other"}},
    "an unknown field": {"body": STEP | {"x": 1}},
    "no JSON": {"body": b"{"},
    "another type": {"kind": "text/plain"},
    "a wrong token": {"token": "wrong"},
    "a deadline": {"more": "x-request-timeout-s: 0\r\n"},
    "no such route": {"path": "/v1/sessions/whole/stop"},
}


def step_of(session: str) -> dict[str, Any]:
    return {"path": f"/v1/sessions/{session}/step", "body": STEP}


async def test_a_step_is_answered_alike_in_one_read_and_in_two():
    async with environments() as (server, http):
        for session in ("whole", "parts"):
            fields = {"session_id": session, "environment": "arithmetic"}
            await http.post("/v1/sessions", json=fields)
            await http.post(f"/v1/sessions/{session}/reset", json=RESET)
        for name, differs in STEPS.items():
            whole = await ask(server.rest_address, request(**step_of("whole") | differs))
            sent = request(**step_of("parts") | differs)
            parts = await ask(server.rest_address, sent[:-1], sent[-1:])
            assert whole == parts, name
        metrics = (await http.get("/metrics")).text
    counts = [line for line in metrics.splitlines() if "calls_total" in line and ".Step" in line]
    assert counts
    assert all(float(line.split()[-1]) % 2 == 0 for line in counts)  # both ways count alike
    assert 'dialoop_calls_running{door="rest"} 0.0' in metrics


async def test_the_log_records_of_a_step_have_its_ids(caplog: pytest.LogCaptureFixture):
    async with environments() as (server, http):
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "arithmetic"})
        await http.post("/v1/sessions/s/reset", json=RESET)
        caplog.set_level(logging.DEBUG, logger="dialoop_services.runtime.calls")
        fields = []
        caplog.handler.addFilter(lambda _: fields.append(dict(_fields.get())) or True)
        status, _, document = await ask(server.rest_address, request(**step_of("s")))
    assert status == "HTTP/1.1 200 OK"
    assert "added" in document
    assert {"rpc": "EnvironmentService.Step", "session_id": "s"} in fields
