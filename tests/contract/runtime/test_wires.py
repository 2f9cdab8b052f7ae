"""What every wire of the inference service has: keys as its clients send them, and named events."""

from __future__ import annotations

from typing import Any

import pytest
from dialoop.errors import NotFound
from dialoop_services.rest.http_routes import ErrorAnswer, HttpAnswer

from tests.support.rest_world import http_of, service


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": ""}, 401),
        # The authorization header is the one that counts where both are sent.
        ({"x-api-key": "secret", "authorization": "Bearer other"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_may_come_in_the_header_of_other_wires(
    headers: dict[str, str], status: int
) -> None:
    async with service("inference", token="secret") as server, http_of(server) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == status


async def test_a_wire_names_its_events_and_ends_its_stream_in_its_own_way() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    def errors(error: Any) -> ErrorAnswer:
        return ErrorAnswer(document={"error": str(error)}, headers={}, event="error")

    for last in (b"", b"data: [DONE]\n\n"):
        answer = HttpAnswer(send, errors)
        await answer.event({"a": 1}, name="started")
        await answer.event({"a": 2})
        await answer.end(last)
        body = b"".join(message.get("body", b"") for message in sent)
        assert body == b'event: started\ndata: {"a":1}\n\ndata: {"a":2}\n\n' + last
        sent.clear()
    broken = HttpAnswer(send, errors)
    await broken.event({"a": 1}, name="started")
    await broken.fail(NotFound("gone"))
    assert sent[-2]["body"] == b'event: error\ndata: {"error":"gone"}\n\n'
