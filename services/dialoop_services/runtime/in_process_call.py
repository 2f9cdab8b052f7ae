"""One call between a client and a servicer of the same process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from dialoop_services.runtime.calls import CallContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from dialoop_services.runtime.handlers import Handler

# Number of answers that a stream may be ahead of its reader, like the window of HTTP/2.
_MAX_AHEAD = 16


def rpc_error(
    code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, Any], ...] = ()
) -> grpc.aio.AioRpcError:
    """Return an error as clients of gRPC get it."""
    initial = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, initial, grpc.aio.Metadata(*trailing), details)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """A call as a client makes it: its request or an iterable of requests, and how to copy them."""

    request: Any
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
    timeout_s: float | None = None
    metadata: tuple[tuple[str, Any], ...] = ()


class Wire:
    """The calls in flight of one server, and the size limit of their messages."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._calls: set[InProcessCall] = set()

    def begin(self, handler: Handler, client_call: ClientCall) -> InProcessCall:
        """Start a call."""
        call = InProcessCall(handler, client_call, limit=self._max_message_bytes)
        self._calls.add(call)
        call.on_end(self._calls.discard)
        return call

    async def drain(self, seconds: float) -> None:
        """Wait for the calls in flight, then cancel those that remain after `seconds`."""
        works = [call.work for call in self._calls]
        if works:
            await asyncio.wait(works, timeout=seconds)
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)


class InProcessContext(CallContext):
    """The context of a call in this process."""

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
    """A running call: await it for its answer, or iterate over its answers."""

    def __init__(self, handler: Handler, client_call: ClientCall, *, limit: int) -> None:
        self._handler: Any = handler
        self._serialize, self._deserialize = client_call.serialize, client_call.deserialize
        self._limit = limit
        self._is_cancelled = False
        loop = asyncio.get_running_loop()
        timeout_s = client_call.timeout_s
        self._ends_at = None if timeout_s is None else loop.time() + timeout_s
        self._context = InProcessContext(client_call.metadata, self._write)
        # The servicer waits for a place and puts; the caller takes. None marks the end.
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(_MAX_AHEAD)
        request = self._copy_request(client_call.request)
        # An empty context, so that caller and service do not share log fields.
        self.work = loop.create_task(self._serve(request), context=contextvars.Context())
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
            raise rpc_error(grpc.StatusCode.INTERNAL, "The service ended the call unanswered.")
        return self._deserialize(answer)

    async def _next(self) -> bytes | None:
        """Return the next answer, or None at the end. Raise the call's error if it failed."""
        try:
            async with asyncio.timeout_at(self._ends_at):
                answer = await self._answers.get()
        except TimeoutError:
            self.work.cancel()
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except asyncio.CancelledError:
            self.cancel()  # nobody waits for the answer: stop the servicer's work too
            raise
        if answer is None:
            self._answers.put_nowait(None)  # for later calls of `_next`
            self._raise_failure()
        return answer

    def _end(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            work.exception()  # read it, so that asyncio does not log it as never retrieved
        self._answers.put_nowait(None)

    def _raise_failure(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self.work.cancelled():
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "The service was stopped.")
        failure = self.work.exception()
        if isinstance(failure, grpc.aio.AioRpcError):
            raise failure
        if failure is not None:
            code = self._context.code() or grpc.StatusCode.UNKNOWN
            raise rpc_error(code, self._context.details(), self._context.trailing)

    async def _serve(self, request: Any) -> None:
        kind = ("unary", "stream")
        handler = self._handler
        name = f"{kind[handler.request_streaming]}_{kind[handler.response_streaming]}"
        function = getattr(handler, name)
        if inspect.isasyncgenfunction(function):
            async with aclosing(function(request, self._context)) as answers:
                async for answer in answers:
                    await self._write(answer)
            return
        answer = await function(request, self._context)
        if not handler.response_streaming:
            await self._write(answer)

    async def _write(self, answer: Any) -> None:
        await self._places.acquire()
        content = self._handler.response_serializer(answer)
        self._require_size(content)
        self._answers.put_nowait(content)

    def _copy_request(self, request: Any) -> Any:
        """Return a copy of the request, or an iterator of copies, for the servicer."""
        return self._copy_each(request) if self._handler.request_streaming else self._copy(request)

    async def _copy_each(self, requests: Any) -> AsyncIterator[Any]:
        try:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    yield self._copy(request)
            else:
                for request in requests:
                    yield self._copy(request)
        except Exception:
            self.cancel()  # as over the network: an error of the request iterator ends the call
            raise

    def _copy(self, request: Any) -> Any:
        content = self._serialize(request)
        self._require_size(content)
        return self._handler.request_deserializer(content)

    def _require_size(self, content: bytes) -> None:
        if len(content) > self._limit:
            text = f"Received message larger than max ({len(content)} vs. {self._limit})"
            raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
