"""A step is answered alike whether its request came whole, without a task, or in parts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from dialoop.environments import ArithmeticTasks, ChatEnv, arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop_services.environment.serving import serving_on
from dialoop_services.rest.endpoint import Endpoint
from dialoop_services.rest.guard import Guard
from dialoop_services.runtime import GrpcServer
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
    """Serve an environment whose steps never wait, and one with tools and rewards."""
    settings: Any = settings_of("environment", rest_port=0, drain_s=1, token=TOKEN)
    plain = ChatEnv(name="plain", tasks=ArithmeticTasks())
    server = GrpcServer(settings)
    async with (
        serving_on(server, settings, Catalogue([plain, arithmetic()])),
        http_of(server, TOKEN) as http,
    ):
        yield server, http


STEP = {"episode": 1, "step_index": 0, "history": ANSWER}
OTHER = STEP | {"history": {"response": {"messages": []}}}
# What differs from a plain step, in this order, and whether it is answered at once.
STEPS: dict[str, tuple[dict[str, Any], bool]] = {
    "a step": ({}, True),
    "a retry": ({}, True),
    "another answer to it": ({"body": OTHER}, True),
    "no such session": ({"path": "/v1/sessions/gone/step"}, True),
    "another session in the body": ({"body": STEP | {"session_id": "other"}}, True),
    "an unknown field": ({"body": STEP | {"x": 1}}, True),
    "no JSON": ({"body": b"{"}, True),
    "another type": ({"kind": "text/plain"}, True),
    "a wrong token": ({"token": "wrong"}, False),
    "a deadline": ({"more": "x-request-timeout-s: 0\r\n"}, False),
    "no such route": ({"path": "/v1/sessions/whole/stop"}, False),
}


def step_of(session: str) -> dict[str, Any]:
    return {"path": f"/v1/sessions/{session}/step", "body": STEP}


async def test_a_step_is_answered_alike_in_one_read_and_in_two(monkeypatch: pytest.MonkeyPatch):
    answered: list[bool] = []
    answer_at_once = Endpoint.at_once

    def note(self: Endpoint, scope: Any, body: bytes) -> Any:
        answer = answer_at_once(self, scope, body)
        if scope["path"].endswith("/step"):
            answered.append(answer is not None)
        return answer

    monkeypatch.setattr(Endpoint, "at_once", note)
    async with environments() as (server, http):
        for session in ("whole", "parts"):
            fields = {"session_id": session, "environment": "plain"}
            await http.post("/v1/sessions", json=fields)
            await http.post(f"/v1/sessions/{session}/reset", json=RESET)
        for name, (differs, is_at_once) in STEPS.items():
            answered.clear()
            whole = await ask(server.rest_address, request(**step_of("whole") | differs))
            assert any(answered) == is_at_once, name
            answered.clear()
            sent = request(**step_of("parts") | differs)
            parts = await ask(server.rest_address, sent[:-1], sent[-1:])
            assert not answered
            assert whole == parts, name
        metrics = (await http.get("/metrics")).text
    counts = [line for line in metrics.splitlines() if "calls_total" in line and ".Step" in line]
    assert counts
    assert all(float(line.split()[-1]) % 2 == 0 for line in counts)  # both ways count alike
    assert 'dialoop_calls_running{door="rest"} 0.0' in metrics


async def test_a_step_that_has_to_wait_is_read_and_counted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    read = []
    from_json = Endpoint._from_json

    def note(self: Endpoint, body: bytes) -> Any:
        read.append(body)
        return from_json(self, body)

    async with environments() as (server, http):
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "arithmetic"})
        await http.post("/v1/sessions/s/reset", json=RESET)
        monkeypatch.setattr(Endpoint, "_from_json", note)
        caplog.set_level(logging.DEBUG, logger="dialoop_services.runtime.calls")
        fields = []
        caplog.handler.addFilter(lambda _: fields.append(dict(_fields.get())) or True)
        status, _, document = await ask(server.rest_address, request(**step_of("s")))
        metrics = (await http.get("/metrics")).text
    assert status == "HTTP/1.1 200 OK"
    assert document["prompt"]
    assert len(read) == 1
    assert {"rpc": "EnvironmentService.Step", "session_id": "s"} in fields
    line = 'calls_total{door="rest",rpc="EnvironmentService.Step",status="OK"} 1.0'
    assert line in metrics


async def test_an_exit_in_a_step_is_an_error_of_that_step(monkeypatch: pytest.MonkeyPatch, caplog):
    def leave(*_: Any) -> Any:
        raise SystemExit("secret")

    async with environments() as (server, http):
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "plain"})
        await http.post("/v1/sessions/s/reset", json=RESET)
        monkeypatch.setattr(ChatEnv, "step_at_once", leave)
        status, _, document = await ask(server.rest_address, request(**step_of("s")))
        metrics = (await http.get("/metrics")).text
    assert status == "HTTP/1.1 500 Internal Server Error"
    assert document["error_id"] in {getattr(record, "error_id", "") for record in caplog.records}
    assert "secret" not in json.dumps(document)
    assert 'dialoop_calls_running{door="rest"} 0.0' in metrics


async def test_a_step_that_has_to_wait_is_let_in_once(
    monkeypatch: pytest.MonkeyPatch,
):
    async with environments() as (server, http):
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "arithmetic"})
        await http.post("/v1/sessions/s/reset", json=RESET)
        looks = []
        refusal = Guard._refusal

        def look(self: Guard, scope: Any) -> Any:
            looks.append(scope["path"])
            return refusal(self, scope)

        monkeypatch.setattr(Guard, "_refusal", look)
        status, _, _ = await ask(server.rest_address, request(**step_of("s")))
        assert looks == ["/v1/sessions/s/step"]
    assert status == "HTTP/1.1 200 OK"
