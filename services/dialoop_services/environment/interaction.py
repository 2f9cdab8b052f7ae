"""One stream of many sessions: requests begin in their order, and no answer waits for another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dialoop.v1 import environment_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

# Longer answers are written one by one, so that none is refused for the size of its neighbours.
_MAX_BYTES = 1_000_000


class Interaction:
    """The answers of one stream.

    A request takes one of `max_waiting` places until its answer is written, and without a free
    place nothing more is read: the client has to wait then.
    """

    def __init__(
        self,
        context: Any,
        answer: Callable[[pb.InteractRequest], Awaitable[pb.InteractResponse]],
        *,
        max_waiting: int,
    ) -> None:
        self._write = context.write  # and no `yield`, because answers come from several tasks
        self._answer = answer
        self._places = asyncio.Semaphore(max_waiting)
        self._takes_items = False
        # Filled by requests that are answered; drained by whoever holds `_writing`. Requests wait
        # in `_flush` until their answers are written.
        self._ready = pb.InteractResponse()
        self._writing = asyncio.Lock()

    async def play(self, requests: AsyncIterator[pb.InteractRequest]) -> None:
        """Answer all requests of the stream."""
        async with asyncio.TaskGroup() as waiting:
            async for message in requests:
                if message.takes_items:
                    self._takes_items = True
                for request in message.items or (message,):
                    await self._places.acquire()
                    waiting.create_task(self._play_one(request))  # tasks begin in their order

    async def _play_one(self, request: pb.InteractRequest) -> None:
        response = await self._answer(request)
        self._ready.items.append(response)
        await self._flush()
        self._places.release()

    async def _flush(self) -> None:
        """Write what is ready, with what becomes ready while an earlier answer is written."""
        async with self._writing:
            await asyncio.sleep(0)  # quick answers that end together are written together
            ready = self._ready
            if not ready.items:
                return
            self._ready = pb.InteractResponse()
            if self._takes_items and (len(ready.items) == 1 or ready.ByteSize() <= _MAX_BYTES):
                await self._write(ready)
                return
            for response in ready.items:
                await self._write(response)
