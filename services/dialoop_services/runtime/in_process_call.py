"""One call between a client and a servicer of the same process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from dialoop_services.runtime.calls import CallContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from dialoop_services.runtime.handlers import Handler

# Answers that a stream may be ahead of its reader, as HTTP/2's window bounds it on the wire.
_MAX_AHEAD = 16


def refused(
    code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, Any], ...] = ()
) -> grpc.aio.AioRpcError:
    """The error that a client of gRPC gets."""
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, none, grpc.aio.Metadata(*trailing), details)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call as a client makes it: its request, or an iterable of them, and how they are copied."""

    request: Any
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
    timeout_s: float | None = None
    metadata: tuple[tuple[str, Any], ...] = ()


class Wire:
    """The calls of one server that are in flight, and the size of what they carry."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._calls: set[InProcessCall] = set()

    def begin(self, handler: Handler, asked: Asked) -> InProcessCall:
        """Start a call."""
        call = InProcessCall(handler, asked, limit=self._max_message_bytes)
        self._calls.add(call)
        call.on_end(self._calls.discard)
        return call

    async def drain(self, seconds: float) -> None:
        """Let the calls in flight end, then end them."""
        works = [call.work for call in self._calls]
        if works:
            await asyncio.wait(works, timeout=seconds)
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)


class InProcessContext(CallContext):
    """The context of such a call."""

    def __init__(self, metadata: tuple[tuple[str, Any], ...], write: Callable[[Any], Any]) -> None:
        super().__init__(metadata)
        self.trailing: tuple[tuple[str, Any], ...] = ()
        self.write = write

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, Any], ...] = (),
    ) -> NoReturn:
        """End the call with a status."""
        self.set_code(code)
        self.set_details(details)
        self.trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError


class InProcessCall:
    """Await it for its answer, or iterate over its answers."""

    def __init__(self, handler: Handler, asked: Asked, *, limit: int) -> None:
        self._handler: Any = handler
        self._serialize, self._deserialize = asked.serialize, asked.deserialize
        self._limit = limit
        self._is_cancelled = False
        loop = asyncio.get_running_loop()
        self._ends_at = None if asked.timeout_s is None else loop.time() + asked.timeout_s
        self._context = InProcessContext(asked.metadata, self._write)
        # Filled by the servicer, which waits for a place, and drained by the caller; None ends it.
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(_MAX_AHEAD)
        given = self._given(asked.request)
        # A context of its own: the caller's log fields are not the service's, nor the reverse.
        self.work = loop.create_task(self._serve(given), context=contextvars.Context())
        self.work.add_done_callback(self._end)

    def on_end(self, forget: Callable[[InProcessCall], None]) -> None:
        """Call `forget` with this call once the servicer is done with it."""
        self.work.add_done_callback(lambda _: forget(self))

    def cancel(self) -> bool:
        """End the call from the caller's side."""
        self._is_cancelled = True
        return self.work.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (answer := await self._next()) is not None:
            self._places.release()
            yield self._deserialize(answer)

    async def _only(self) -> Any:
        answer = await self._next()
        if answer is None:
            raise refused(grpc.StatusCode.INTERNAL, "There was no answer.")
        return self._deserialize(answer)

    async def _next(self) -> bytes | None:
        """The next answer, None at the end; the call's error when it failed."""
        try:
            async with asyncio.timeout_at(self._ends_at):
                answer = await self._answers.get()
        except TimeoutError:
            self.work.cancel()
            raise refused(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except asyncio.CancelledError:
            self.cancel()  # a caller who leaves takes the work along
            raise
        if answer is None:
            self._answers.put_nowait(None)  # whoever asks again gets the same end
            self._raise_failure()
        return answer

    def _end(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            work.exception()  # known from here on, also where nobody waits for an answer any more
        self._answers.put_nowait(None)

    def _raise_failure(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self.work.cancelled():
            raise refused(grpc.StatusCode.UNAVAILABLE, "The service was stopped.")
        failure = self.work.exception()
        if isinstance(failure, grpc.aio.AioRpcError):
            raise failure
        if failure is not None:
            code = self._context.code() or grpc.StatusCode.UNKNOWN
            raise refused(code, self._context.details(), self._context.trailing)

    async def _serve(self, given: Any) -> None:
        kind = ("unary", "stream")
        handler = self._handler
        name = f"{kind[handler.request_streaming]}_{kind[handler.response_streaming]}"
        function = getattr(handler, name)
        if inspect.isasyncgenfunction(function):
            async for answer in function(given, self._context):
                await self._write(answer)
            return
        answer = await function(given, self._context)
        if not handler.response_streaming:
            await self._write(answer)

    async def _write(self, answer: Any) -> None:
        await self._places.acquire()
        self._answers.put_nowait(self._checked(self._handler.response_serializer(answer)))

    def _given(self, request: Any) -> Any:
        """The request as the servicer gets it: a copy, or an iterator of copies."""
        return self._each(request) if self._handler.request_streaming else self._copied(request)

    async def _each(self, requests: Any) -> AsyncIterator[Any]:
        try:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    yield self._copied(request)
            else:
                for request in requests:
                    yield self._copied(request)
        except Exception:
            self.cancel()  # as on the wire: requests that fail to come end the call
            raise

    def _copied(self, request: Any) -> Any:
        return self._handler.request_deserializer(self._checked(self._serialize(request)))

    def _checked(self, content: bytes) -> bytes:
        if len(content) > self._limit:
            text = f"Received message larger than max ({len(content)} vs. {self._limit})"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        return content
