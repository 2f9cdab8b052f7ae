"""The depth of the queue among the metrics, by which scorers are scaled."""

from __future__ import annotations

import asyncio

from dialoop.errors import Unavailable
from dialoop_services.replay.__main__ import _keep_depth
from dialoop_services.replay.store import QueueLimits

from tests.support.queue_model.store import ModelStore


async def test_the_depth_of_the_queue_is_shown_and_an_unknown_one_is_not() -> None:
    store = ModelStore(QueueLimits())
    depth: dict[str, float] = {}
    showing = asyncio.create_task(_keep_depth(store, "run", depth))
    await asyncio.sleep(0.05)
    assert depth == {"leased": 0, "unscored": 0, "scored": 0, "training": 0}
    showing.cancel()

    class Away:
        async def apply(self, *_: object) -> None:
            raise Unavailable("It is away.")

    showing = asyncio.create_task(_keep_depth(Away(), "run", depth))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert depth == {}
    showing.cancel()
