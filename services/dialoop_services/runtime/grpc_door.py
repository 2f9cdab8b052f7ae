"""The gRPC door of a service: calls of grpcio's core, answered on the event loop.

door = GrpcDoor(handlers.find, [("grpc.so_reuseport", 0)], max_calls=1000)
port = door.listen("127.0.0.1:0", None)
door.open()
await door.close(drain_s=10)

It takes the place of grpc.aio's server, which hands every event of a call to the event loop by a
thread and a socket: two to three times the CPU of a call that is answered at once (decision 27).
Here the event loop takes events from the core's queue itself, and a thread waits for the next one
while there are none. Connections, HTTP/2, TLS, deadlines, flow control and size limits are the
core's, as they are below grpc.aio.

grpc's own servers are written on `cygrpc`, which is not a public interface. What servicers and
callers rely on is in `tests/contract/runtime/test_grpc_door.py`, for the next version of grpcio.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from dialoop_services.runtime.calls import CallContext
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dialoop_services.runtime.handlers import Handler

    Metadata = tuple[tuple[str, Any], ...]

log = logging.getLogger(__name__)

_NO_FLAGS = 0
_TIMEOUT = cygrpc.CompletionType.queue_timeout
_SHUTDOWN = cygrpc.CompletionType.queue_shutdown
# Events that are taken before other work of the event loop has its turn.
_MAX_EVENTS = 64
# Seconds for methods whose calls were cancelled to clean up.
_CLEAN_UP_S = 1.0
# Seconds after which the thread looks whether the event loop that it waits for was closed.
_LOOK_AT_LOOP_S = 1.0
# Seconds after an error of the queue, so that one that stays costs no whole core.
_AFTER_ERROR_S = 0.1
# Seconds between the end of a stream of requests and the news that its connection broke off.
_BREAK_OFF_S = 0.001


class GrpcDoor:
    """Answers gRPC calls from `open` until `close`, on the event loop that opened it."""

    def __init__(
        self,
        find: Callable[[str], Handler | None],
        options: Sequence[tuple[str, Any]],
        *,
        max_calls: int | None = None,
    ) -> None:
        """Take a function that finds the method of a path, the core's options and a limit.

        A call beyond `max_calls` is refused with RESOURCE_EXHAUSTED.
        """
        self._find = find
        self._max_calls = max_calls
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(tuple(options), False)
        self._server.register_completion_queue(self._queue)
        self._calls: set[_Call] = set()
        self.max_sent_bytes = dict(options).get("grpc.max_send_message_length")
        self.is_shut = False
        """Whether the queue is shut: the core then aborts the process at any further operation."""
        self._closing: asyncio.Task[None] | None = None
        self._is_open = False
        self._has_ended = False  # no event will come any more
        self._is_drained = threading.Lock()  # held while the event loop takes events
        self._is_drained.acquire()

    def listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Bind the address and return its port; raise InvalidConfig (CANNOT_LISTEN)."""
        inner: Any = credentials
        secret = () if inner is None else (inner._credentials,)
        port: int = self._server.add_http2_port(address.encode(), *secret)
        if not port:
            raise InvalidConfig(
                f"Cannot listen on {address}.",
                reason=Reason.CANNOT_LISTEN,
                remedy="Choose another.",
            )
        return port

    def open(self) -> None:
        """Begin to take calls."""
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._stopped: asyncio.Future[Any] = self._loop.create_future()
        self._ended: asyncio.Future[Any] = self._loop.create_future()
        waiter = threading.Thread(target=self._wait, name="grpc-door", daemon=True)
        waiter.start()
        self._server.start()
        self._waiter, self._is_open = waiter, True
        self._ask()

    async def close(self, drain_s: float) -> None:
        """Refuse new calls, and cancel those that have not ended after `drain_s` seconds.

        Once begun it goes on to its end, whoever waits for it.
        """
        if self._closing is None:
            if not self._is_open:
                return
            self._closing = self._loop.create_task(self._shut(drain_s))
        await asyncio.shield(self._closing)

    async def _shut(self, drain_s: float) -> None:
        self._is_open = False
        self._server.shutdown(self._queue, partial(_note_success, self._stopped))
        await asyncio.wait([self._stopped], timeout=drain_s)
        if not self._stopped.done():
            self._server.cancel_all_calls()
            await asyncio.wait([self._stopped])
        works = [call.work for call in self._calls if call.work is not None]
        if works:
            await asyncio.wait(works, timeout=_CLEAN_UP_S)
        self.is_shut = True
        self._queue.shutdown()
        await asyncio.wait([self._ended])
        self._waiter.join()
        self._server.destroy()

    def forget(self, call: _Call) -> None:
        """Note that a call has ended."""
        self._calls.discard(call)

    def _ask(self) -> None:
        """Ask the core for one more call."""
        self._server.request_call(self._queue, self._queue, self._begin)

    def _wait(self) -> None:
        """Wait for the next event while the event loop takes none; runs in a thread."""
        while not self._has_ended:
            try:
                event = self._queue.poll()
            except Exception:  # such as no memory for a message
                log.exception("An event of a gRPC call could not be taken.")
                time.sleep(_AFTER_ERROR_S)
                continue
            try:
                self._loop.call_soon_threadsafe(self._take, event, context=self._context)
            except RuntimeError:  # the event loop was closed without this door
                return
            del event  # or its call would live until the next one
            while not self._is_drained.acquire(timeout=_LOOK_AT_LOOP_S):
                if self._loop.is_closed():
                    return

    def _take(self, event: Any = None) -> None:
        """Handle the events that are there, and have the thread wait when there are none."""
        is_idle = False
        try:
            is_idle = self._handle_all(event or self._queue.poll(deadline=0))
        finally:  # an interrupt may be raised here, and the next event has to be taken all the same
            if is_idle:
                self._is_drained.release()
            else:
                self._loop.call_soon(self._take)

    def _handle_all(self, event: Any) -> bool:
        """Handle the event and those that follow; return whether none is left for now."""
        for num_handled in range(_MAX_EVENTS):
            if num_handled:
                event = self._queue.poll(deadline=0)
            if event.completion_type == _TIMEOUT:
                return num_handled == 0
            if event.completion_type == _SHUTDOWN:
                self._has_ended = True
                _resolve(self._ended, None)
                return True
            try:
                event.tag(event)
            except Exception:
                log.exception("An event of a gRPC call could not be handled.")
        return False

    def _begin(self, event: Any) -> None:
        """Take a call that has arrived."""
        if not event.success or self.is_shut:  # the server stops
            return
        if self._is_open:
            self._ask()
        handler = self._find(event.call_details.method.decode(errors="replace"))
        call = _Call(event, handler, self)
        call.watch()
        if handler is None:
            call.refuse(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        elif self._max_calls is not None and len(self._calls) >= self._max_calls:
            call.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        else:
            self._calls.add(call)
            call.begin(self._loop)


class _Call(CallContext):
    """One call, which is the context of its method."""

    def __init__(self, event: Any, handler: Handler | None, door: GrpcDoor) -> None:
        super().__init__(event.invocation_metadata)
        self._call = event.call
        self._handler: Any = handler
        self._door = door
        self._trailing: Metadata = ()
        self._has_sent_metadata = False
        self._has_ended = False
        self._is_cancelled = False
        # A message that is on its way stays so when whoever waited for it is cancelled.
        self._receiving: asyncio.Future[bytes | None] | None = None
        self._sending: asyncio.Future[bool] | None = None
        self._is_reading = False
        self.work: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Notice from now on when the call is cancelled."""
        closing = (cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),)
        self._call.start_server_batch(closing, self._close)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the method as soon as its request is here."""
        self._loop = loop
        if self._handler.request_streaming:
            self._run(_Requests(self._receive, self._handler.request_deserializer))
        else:
            receiving = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
            self._call.start_server_batch(receiving, self._start)

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """Answer with a status only."""
        self.set_code(code)
        self.set_details(details)
        self._end()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send metadata before the first answer; raise RuntimeError where one was sent."""
        await self._send(metadata)

    async def write(self, answer: Any) -> None:
        """Send one answer of a stream, and wait until the connection has taken it."""
        content = self._handler.response_serializer(answer)
        self._note_size(content)
        await self._send((), cygrpc.SendMessageOperation(content, _NO_FLAGS))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with a status."""
        self.set_code(code)
        self.set_details(details)
        self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError

    def _start(self, event: Any) -> None:
        """Run the method with the request that was received."""
        content = event.batch_operations[0].message()
        if content is not None and not self._is_cancelled and not self._door.is_shut:
            self._run(content)
            return
        self._door.forget(self)
        if not self._is_cancelled:  # the core has answered itself if it found the message too large
            self.refuse(grpc.StatusCode.UNIMPLEMENTED, "The call ended before its request.")

    def _run(self, request: Any) -> None:
        self.work = self._loop.create_task(self._serve(request))

    async def _serve(self, request: Any) -> None:
        """Run the method and send what it answers."""
        handler = self._handler
        content = None
        try:
            if not handler.request_streaming:
                request = handler.request_deserializer(request)
            if handler.response_streaming:
                await self._stream(request)
            else:
                function = (
                    handler.stream_unary if handler.request_streaming else handler.unary_unary
                )
                content = handler.response_serializer(await function(request, self))
        except grpc.aio.AbortError:
            pass  # `abort` has set the status
        except asyncio.CancelledError:
            self.set_code(grpc.StatusCode.CANCELLED)
            self.set_details("The service has cancelled the call.")
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._call.cancel()
            raise
        finally:
            self._door.forget(self)
        try:
            self._end(content)
        except Exception as error:  # no answer that the core can send
            self._fail(error)
            self._call.cancel(cygrpc.StatusCode.internal, self.details())

    def _fail(self, error: Exception) -> None:
        """Set the status of an unexpected error, whose text goes to the log only."""
        self.set_code(grpc.StatusCode.INTERNAL)
        self.set_details(public_error(error).message)

    async def _stream(self, request: Any) -> None:
        handler = self._handler
        function = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if inspect.isasyncgenfunction(function):
            async with aclosing(function(request, self)) as answers:
                async for answer in answers:
                    await self.write(answer)
        else:
            await function(request, self)

    def _end(self, content: bytes | None = None) -> None:
        """Send the last answer, if any, and the status."""
        self._has_ended = True
        if self._is_cancelled or self._door.is_shut:
            return
        code = self.code() or grpc.StatusCode.OK
        number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code)
        message: tuple[Any, ...] = ()
        if content is not None and not number:
            self._note_size(content)
            message = (cygrpc.SendMessageOperation(content, _NO_FLAGS),)
        status = cygrpc.SendStatusFromServerOperation(
            self._trailing, number, self.details(), _NO_FLAGS
        )
        self._begin_batch((*self._metadata_once(()), *message, status), _do_nothing)

    def _close(self, event: Any) -> None:
        """Stop the method if the caller has gone, its time is up or the service stops."""
        if event.batch_operations[0].cancelled():
            self._is_cancelled = True
            if self.work is not None and not self._has_ended:
                # Later, since a task that is cancelled before its first step never gets to its end.
                self._loop.call_soon(self.work.cancel)

    def _metadata_once(self, metadata: Metadata) -> tuple[Any, ...]:
        """Return the operation that has to come before the first answer or the status."""
        if self._has_sent_metadata:
            return ()
        return (cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),)

    def _note_size(self, content: bytes) -> None:
        """Log an answer that the core will refuse, since it says so to the caller alone."""
        limit = self._door.max_sent_bytes
        if limit is not None and len(content) > limit:
            log.warning(
                "An answer is larger than a message may be.",
                extra={"num_bytes": len(content), "max_message_bytes": limit},
            )

    async def _receive(self) -> bytes | None:
        """Return the next message; None at the end; CancelledError where the stream broke off."""
        if self._is_reading:
            raise RuntimeError("Another task waits for the next message of this call.")
        self._is_reading = True
        try:
            if self._receiving is None:
                receiving = self._loop.create_future()
                reading = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
                self._begin_batch(reading, partial(_note_message, receiving))
                self._receiving = receiving
            content = await asyncio.shield(self._receiving)
            self._receiving = None
            if content is None:
                # The core reports a connection that broke off in the same way, and only then why.
                await asyncio.sleep(_BREAK_OFF_S)
                if self._is_cancelled:
                    raise asyncio.CancelledError
            return content
        finally:
            self._is_reading = False

    async def _send(self, metadata: Metadata, *messages: Any) -> None:
        """Send something; raise CancelledError if it cannot be sent any more, or is too large."""
        while self._sending is not None and not self._sending.done():
            await asyncio.shield(self._sending)
        operations = (*self._metadata_once(metadata), *messages)
        if not operations:
            raise RuntimeError("Metadata were sent already.")
        sending = self._loop.create_future()
        self._begin_batch(operations, partial(_note_success, sending))
        self._has_sent_metadata, self._sending = True, sending
        if not await asyncio.shield(sending):
            raise asyncio.CancelledError

    def _begin_batch(self, operations: tuple[Any, ...], handle: Callable[[Any], None]) -> None:
        """Begin operations, whose event `handle` gets; CancelledError when the queue is shut."""
        if self._door.is_shut:
            raise asyncio.CancelledError
        if self._call.start_server_batch(operations, handle):
            raise RuntimeError("The core refused operations of a call.")


class _Requests:
    """The messages of a stream of requests."""

    def __init__(self, receive: Callable[[], Any], deserialize: Callable[[bytes], Any]) -> None:
        self._receive, self._deserialize = receive, deserialize

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        content = await self._receive()
        if content is None:
            raise StopAsyncIteration
        return self._deserialize(content)


# A future must not keep its event: the event has the function that resolves the future, and the
# message, which would then live until Python looks for cycles.


def _note_message(done: asyncio.Future[bytes | None], event: Any) -> None:
    _resolve(done, event.batch_operations[0].message())


def _note_success(done: asyncio.Future[bool], event: Any) -> None:
    _resolve(done, event.success)


def _resolve(done: asyncio.Future[Any], result: Any) -> None:
    with suppress(asyncio.InvalidStateError):  # whoever waited was cancelled
        done.set_result(result)


def _do_nothing(_: Any) -> None:
    """Take the event of an end that nobody waits for."""
