"""What surrounds every HTTP call: its deadline, a client that may disconnect, its errors."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import DeadlineExceeded, DialoopError, Unavailable
from dialoop.reasons import Reason

from dialoop_services.rest.bodies import ClientDisconnected
from dialoop_services.rest.problems import FieldsRefused
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from dialoop_services.runtime.calls import Call

TIMEOUT_HEADER = "x-request-timeout-s"
# Calls that end before this are not watched: a watcher task for each would cost time.
_UNWATCHED_S = 0.05


class Caller:
    """The client of one call. Inside its context, a disconnect cancels the task that answers."""

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self.receive = receive
        self._is_disconnected = False
        self._answering: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_disconnected(self) -> bool:
        """Return whether the client closed the connection."""
        return self._is_disconnected

    def __enter__(self) -> None:
        self._answering = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._start)

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def clear_cancellation(self) -> bool:
        """Return whether a disconnect caused the cancellation; if so, clear it."""
        if self._is_disconnected and self._answering is not None:
            self._answering.uncancel()
        return self._is_disconnected

    def _start(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._is_disconnected = True
        assert self._answering is not None
        self._answering.cancel()


def timeout_of(headers: Mapping[bytes, bytes]) -> float | None:
    """Return the seconds within which the caller wants an answer; None for no limit."""
    text = headers.get(TIMEOUT_HEADER.encode())
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise FieldsRefused(
            f"{TIMEOUT_HEADER} is not a positive number of seconds.",
            reason=Reason.INVALID_FIELD,
            remedy="Give a number above 0, or leave the header out.",
            fields=[TIMEOUT_HEADER],
        )
    return seconds


class Failing(Protocol):
    """An answer that may end in an error."""

    async def fail(self, error: DialoopError) -> None:
        """Answer with the error, or end a started answer with it."""


async def serve_call(call: Call, caller: Caller, answer: Failing, serving: Awaitable[None]) -> None:
    """Await `serving`, end `call` with its status, and answer with what it raises."""
    try:
        status = "CANCELLED"
        try:
            await serving
            status = "OK"
        except Exception as error:
            status = error.status.name if isinstance(error, DialoopError) else "INTERNAL"
            raise
        finally:
            call.end(status)
    except ClientDisconnected:
        return
    except asyncio.CancelledError:
        if not caller.clear_cancellation():  # the server's time to drain has run out
            stopping = Unavailable(
                "The service is stopping.",
                reason=Reason.STOPPING,
                remedy="Try again when it is back.",
            )
            await answer.fail(stopping)
    except Exception as error:
        await answer.fail(public_error(error))


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raise DeadlineExceeded when the block takes longer than `seconds`; None for no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(
            f"The service did not answer within {seconds:g} s.",
            remedy=f"Raise {TIMEOUT_HEADER}, or send a smaller request.",
        ) from error
