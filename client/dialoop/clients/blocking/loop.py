"""One event loop in a thread of its own: what blocking clients run on.

with BackgroundLoop() as loop:
    loop.run(asyncio.sleep(0.1, "awake"))      # "awake"
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason

T = TypeVar("T")
P = ParamSpec("P")


class _End:
    """What an exhausted iterator gives."""


_END: Final = _End()


class BackgroundLoop:
    """Runs coroutines to their end for threads that have no event loop; any thread may call."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a client nobody closed does not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._serve, name="dialoop-loop", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result; PreconditionFailed inside a running event loop."""
        try:
            self._require_usable()
        except PreconditionFailed:
            work.close()  # never awaited, on purpose
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C reaches the caller, not the loop's thread
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items one after the other; leaving the loop over them ends the stream."""
        self._require_usable()
        return self._yield_all(items)

    def close(self) -> None:
        """Cancel what still runs and end the thread; closing twice does no harm."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _yield_all(self, items: AsyncIterator[T]) -> Iterator[T]:
        try:
            while not isinstance(item := self.run(_next(items)), _End):
                yield item
        finally:
            if isinstance(items, AsyncGenerator) and not self._loop.is_closed():
                self.run(_end(items))

    def _require_usable(self) -> None:
        if self._loop.is_closed():
            raise PreconditionFailed(
                "This blocking client is closed.",
                reason=Reason.CLIENT_CLOSED,
                remedy="Make another.",
            )
        if not self._thread.is_alive():
            raise PreconditionFailed(
                "This blocking client was made before this process was forked.",
                reason=Reason.CLIENT_CLOSED,
                remedy="Make another after the fork.",
            )
        if asyncio._get_running_loop() is not None:
            raise PreconditionFailed(
                "A blocking client was called inside a running event loop, which it would stop.",
                reason=Reason.EVENT_LOOP_RUNNING,
                remedy="Use the async client here (dialoop.Dialoop) and await its methods.",
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _next(items: AsyncIterator[T]) -> T | _End:
    return await anext(items, _END)


async def _end(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a twin's method, which runs the one of this name of its `_client` on its `_loop`."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        work = getattr(self._client, method.__name__)(*args, **kwargs)
        run = self._loop.run if inspect.iscoroutine(work) else self._loop.iterate
        return run(work)

    return call


class _Twin:
    def __init__(self, client: object, loop: BackgroundLoop) -> None:
        self._client, self._loop = client, loop


def twin_of(client: type) -> type:
    """Return the blocking twin of an async client: any thread without an event loop may call it."""
    methods = inspect.getmembers(client, inspect.isfunction)
    twins = {name: blocking(method) for name, method in methods if not name.startswith("_")}
    about = f"Blocking twin of {client.__name__}: any thread without an event loop may call it."
    return type(f"Blocking{client.__name__}", (_Twin,), {"__doc__": about, **twins})
