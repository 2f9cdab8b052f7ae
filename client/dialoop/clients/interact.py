"""Many sessions over one stream: fewer calls to set up than one per step.

async with Channel("127.0.0.1:50051") as channel, InteractiveSessions(channel) as sessions:
    group = await play_group(task, sessions=sessions, policy=policy, group_id="g#1")
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Self

from dialoop.clients.channel import A, Channel, Q, Rpc, rpc_of
from dialoop.clients.environment import (
    CLOSE_SESSION,
    CREATE_SESSION,
    RESET,
    STEP,
    EnvironmentClient,
)
from dialoop.clients.errors import error_of_item
from dialoop.errors import DeadlineExceeded, DialoopError, Unavailable
from dialoop.reasons import Reason
from dialoop.v1 import environment_service_pb2 as pb

INTERACT = rpc_of(pb, "EnvironmentService", "Interact")
_STREAMED = {
    CREATE_SESSION: "create_session",
    RESET: "reset",
    STEP: "step",
    CLOSE_SESSION: "close_session",
}
"""The rpcs that the stream carries, by the field of their messages in it."""
_LEAVE_S = 1.0


class InteractiveSessions(EnvironmentClient):
    """An EnvironmentClient whose sessions are created, reset, stepped and closed on one stream.

    A stream that broke stays broken: every call raises why, and the sessions themselves live on at
    the service, for another stream or an EnvironmentClient to continue.
    """

    def __init__(self, channel: Channel, *, deadline_s: float = 60.0) -> None:
        super().__init__(channel)
        self._deadline_s = deadline_s
        self._ids = itertools.count()
        # Filled by calls, which then wait for their answers; drained by the stream. None ends it.
        self._outbox: asyncio.Queue[pb.InteractRequest | None] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[pb.InteractResponse]] = {}
        self._broken: DialoopError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        if not self._waiting:  # the service then ends the stream at once
            self._outbox.put_nowait(None)
            await asyncio.wait([self._reader], timeout=_LEAVE_S)
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _call(self, rpc: Rpc[Q, A], request: Q) -> A:
        if rpc not in _STREAMED:
            return await super()._call(rpc, request)
        answer: A = getattr(await self._ask(**{_STREAMED[rpc]: request}), _STREAMED[rpc])
        return answer

    async def _ask(self, **request: Any) -> pb.InteractResponse:
        """Send one request and wait for the answer that carries its id."""
        if self._broken is not None:
            raise self._broken
        request_id = str(next(self._ids))
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(pb.InteractRequest(request_id=request_id, **request))
        try:
            async with asyncio.timeout(self._deadline_s):
                response: pb.InteractResponse = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"No answer within {self._deadline_s:g} s.") from None
        finally:
            self._waiting.pop(request_id, None)
        if response.HasField("error"):
            raise error_of_item(response.error)
        return response

    async def _requests(self) -> AsyncIterator[pb.InteractRequest]:
        """Yield what calls ask, until a None."""
        while (request := await self._outbox.get()) is not None:
            yield request

    async def _read(self) -> None:
        """Hand answers to those who wait for them, until the stream breaks."""
        broken: DialoopError = Unavailable("The stream ended.", reason=Reason.STREAM_ENDED)
        try:
            async for answer in self._channel.exchange(INTERACT, self._requests()):
                waiting = self._waiting.get(answer.request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except DialoopError as error:
            broken = error
        finally:
            self._broken = broken
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(broken)
