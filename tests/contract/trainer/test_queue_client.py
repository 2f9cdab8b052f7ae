"""What the queue may lose with its last second is told again, in the right order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dialoop.errors import Unavailable
from dialoop.sequences import PolicyVersion
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.trainer.data.queue_client import LOSS_WINDOW_S, QueueClient

from tests.support.loop.virtual_time import run_virtually


class RecordingChannel:
    """Keeps the time and the contents of every call; `fails_from` is when it goes away."""

    def __init__(self, fails_from: float = float("inf")) -> None:
        self.calls: list[tuple[float, Any]] = []
        self.fails_from = fails_from

    async def call(self, rpc: Any, request: Any) -> Any:
        del rpc
        now = asyncio.get_running_loop().time()
        if now >= self.fails_from:
            raise Unavailable("It is away.", remedy="Start it.")
        if isinstance(request, pb.AcknowledgeRequest):
            self.calls.append((now, [item.lease_id for item in request.items]))
            return pb.AcknowledgeResponse()
        number = request.policy_version.number
        announced = (number, request.max_outstanding_groups, list(request.trained_lease_ids))
        self.calls.append((now, announced))
        return pb.AdvancePolicyResponse(credits=5)


def client_on(channel: RecordingChannel) -> QueueClient:
    channel_of_any: Any = channel
    return QueueClient(channel_of_any)


def test_acknowledgements_are_told_again_after_the_loss_window() -> None:
    async def main(channel: RecordingChannel) -> None:
        client = client_on(channel)
        assert await client.acknowledge("r", ["a", "b"]) == ()
        await client.acknowledge("r", [])
        await asyncio.sleep(60)

    channel = RecordingChannel()
    run_virtually(main(channel))
    assert channel.calls == [(0.0, ["a", "b"]), (LOSS_WINDOW_S, ["a", "b"])]


def test_the_newest_announcement_is_told_again_with_what_each_was_trained_on() -> None:
    async def main(channel: RecordingChannel) -> None:
        client = client_on(channel)
        for number, trained in ((1, ["a"]), (2, ["b"])):
            version = PolicyVersion(lineage="main", number=number)
            credits_left = await client.advance_policy(
                "r", version, trained_lease_ids=trained, max_outstanding_groups=number
            )
            assert credits_left == 5
            await asyncio.sleep(1)
        await asyncio.sleep(60)

    channel = RecordingChannel()
    run_virtually(main(channel))
    assert channel.calls == [
        (0.0, (1, 1, ["a"])),
        (1.0, (2, 2, ["b"])),
        (LOSS_WINDOW_S, (2, 2, ["a"])),
        (LOSS_WINDOW_S + 1, (2, 2, ["b"])),
    ]


def test_a_queue_that_is_away_is_logged_and_closing_stops_what_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(channel: RecordingChannel) -> None:
        client = client_on(channel)
        await client.acknowledge("r", ["a"])
        await asyncio.sleep(LOSS_WINDOW_S + 1)
        channel.fails_from = float("inf")
        await client.acknowledge("r", ["b"])
        await client.close()
        await asyncio.sleep(60)

    channel = RecordingChannel(fails_from=1.0)
    run_virtually(main(channel))
    assert [what for _, what in channel.calls] == [["a"], ["b"]]
    assert "The queue was not told again: It is away." in caplog.text
