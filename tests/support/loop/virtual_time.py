"""An event loop on which waiting takes no time: its clock jumps to the next timer.

run_virtually(main())       # asyncio.sleep(3600) returns at once, and loop.time() is an hour later

Threads run at once and in place, so a run with seeded random numbers is the same every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar
from unittest.mock import patch

from dialoop import user_functions
from dialoop_services.rest.endpoint import RestContext

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting, it moves its clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events: list[Any] = super().select(0)
        if events or not timeout:
            if timeout is None and not events:
                raise RuntimeError("Everything waits, and nothing will ever happen.")
            return events
        self.now_s += timeout
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.set_default_executor(_InPlace())

    def time(self) -> float:
        return self._jumping.now_s


class _InPlace(ThreadPoolExecutor):
    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class ServicerChannel:
    """A channel whose calls are the servicer's own: the clock would not wait for a socket."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def call(self, rpc: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        """Return the answer, as other bytes than the servicer's."""
        copied = type(request).FromString(request.SerializeToString())
        async with asyncio.timeout(rpc.deadline_s if deadline_s is None else deadline_s):
            answer = await self._method(rpc)(copied, RestContext())
        return type(answer).FromString(answer.SerializeToString())

    async def stream(self, rpc: Any, request: Any) -> AsyncIterator[Any]:
        """Yield the answers."""
        async with aclosing(self._method(rpc)(request, RestContext())) as answers:
            async for answer in answers:
                yield answer

    def _method(self, rpc: Any) -> Any:
        return getattr(self._servicer, rpc.path.rpartition("/")[2])


async def _in_place(function: Callable[..., Any], call_it: Callable[[], Any]) -> Any:
    """Stand in for the threads of users' functions, for which the clock would not wait."""
    del function
    return call_it()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own."""
    with (
        patch.object(user_functions, "_in_thread", _in_place),
        asyncio.Runner(loop_factory=_VirtualLoop) as runner,
    ):
        return runner.run(main)
