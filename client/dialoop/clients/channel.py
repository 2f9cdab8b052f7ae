"""A connection to one service: tokens, deadlines, retries, and errors of our own tree.

async with Channel("127.0.0.1:50051", token="secret") as channel:
    environment = EnvironmentClient(channel)
"""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass

from dialoop.clients.errors import error_of
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.clients.tls import open_channel
from dialoop.errors import DialoopWarning, Unavailable
from dialoop.reasons import Reason
from dialoop.v1.stream_pb2 import StreamEnd
from dialoop.waits import current_waits

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from google.protobuf.message import Message

    Metadata = tuple[tuple[str, str], ...]

Q = TypeVar("Q", bound="Message")
A = TypeVar("A", bound="Message")

Credentials = Callable[[], str]
"""Returns the bearer token of this moment."""

EPOCH_METADATA = "dialoop-epoch"
"""Key of the metadata that name the instance of the registry that a call is for."""

_ONCE = RetryPolicy(max_attempts=1)
_LOST = "Internal error from Core"
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)


@dataclass(frozen=True, slots=True)
class Rpc(Generic[Q, A]):
    """One rpc: its path, its messages, and how to call it.

    Set `is_retried` only where a second call does no harm when the first one's answer was lost.
    `deadline_s` is infinite where the service itself limits how long its work takes. `is_poll` says
    that the service may answer late with nothing, so that a call in flight shows no stall.
    """

    path: str
    request: type[Q]
    answer: type[A]
    is_retried: bool = field(default=False, kw_only=True)
    deadline_s: float = field(default=60.0, kw_only=True)
    is_poll: bool = field(default=False, kw_only=True)


def rpc_of(messages: ModuleType, service: str, name: str, **options: Any) -> Rpc[Any, Any]:
    """Return an rpc of a service; `messages` is the module made of its proto file."""
    method = messages.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    path = f"/{method.containing_service.full_name}/{name}"
    request, answer = map(GetMessageClass, (method.input_type, method.output_type))
    return Rpc(path, request, answer, **options)


class Channel:
    """Calls the rpcs of the service at `host:port`; make it inside a running event loop.

    `token` may be a function that returns it, which is called for each call: tokens may end.
    Where DIALOOP_TLS_CA is set, the connection is encrypted. With an `epoch` only the instance
    of the registry that has it answers; another service at the address refuses with Unavailable
    (OTHER_INCARNATION).
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | Credentials = "",
        max_message_bytes: int = 64 * 1024 * 1024,
        retry: RetryPolicy | None = None,
        epoch: int = 0,
    ) -> None:
        self.address = address
        self._waits = current_waits.get()
        self._token = token
        self._epoch: Metadata = ((EPOCH_METADATA, str(epoch)),) if epoch else ()
        self._retry = retry or RetryPolicy()
        self._channel = _connection(address, max_message_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight raise Unavailable."""
        await self._channel.close()

    @property
    def _metadata(self) -> Metadata:
        token = self._token if isinstance(self._token, str) else self._token()
        return ((("authorization", f"Bearer {token}"),) if token else ()) + self._epoch

    async def wait_until_connected(self, *, timeout_s: float = 30.0) -> None:
        """Wait until the server listens; raises Unavailable when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise Unavailable(
                f"{self.address} did not answer within {timeout_s:g} s.",
                remedy="Is the service running there?",
            ) from None

    async def call(self, rpc: Rpc[Q, A], request: Q, *, deadline_s: float | None = None) -> A:
        """Send one request and return its answer; the deadline covers all attempts."""
        method = _method(self._channel.unary_unary, rpc)
        within_s = rpc.deadline_s if deadline_s is None else deadline_s
        ends_at = time.monotonic() + within_s

        async def attempt() -> A:
            left_s = max(0.0, ends_at - time.monotonic())
            timeout_s = None if math.isinf(left_s) else left_s
            async with _Translating(self.address):
                answer: A = await method(request, timeout=timeout_s, metadata=self._metadata)
            return answer

        policy = self._retry if rpc.is_retried else _ONCE
        with self._waiting_for(rpc):
            answer = await retry(attempt, policy, within_s=within_s)
        tell_warnings(answer)
        return answer

    async def stream(
        self, rpc: Rpc[Q, A], request: Q, *, deadline_s: float | None = None
    ) -> AsyncGenerator[A, None]:
        """Send one request and yield its answers; there is no deadline by default."""
        method = _method(self._channel.unary_stream, rpc)
        async with _Translating(self.address):
            call = method(request, timeout=deadline_s, metadata=self._metadata)
            try:
                async for answer in call:
                    yield answer
            finally:
                call.cancel()

    async def upload(
        self, rpc: Rpc[Q, A], requests: AsyncIterator[Q], *, deadline_s: float | None = None
    ) -> A:
        """Send many requests and return the answer; not retried: the requests are used up."""
        method = _method(self._channel.stream_unary, rpc)
        timeout_s = rpc.deadline_s if deadline_s is None else deadline_s
        with self._waiting_for(rpc):
            async with _Translating(self.address):
                marked = _with_mark(rpc.request, requests)
                try:
                    answer: A = await method(marked, timeout=timeout_s, metadata=self._metadata)
                except grpc.aio.AioRpcError as error:
                    if _is_status_lost(error):
                        call = method(iter(()), timeout=timeout_s, metadata=self._metadata)
                        raise await _refusal(call, error) from error
                    raise
                return answer

    async def exchange(self, rpc: Rpc[Q, A], requests: AsyncIterator[Q]) -> AsyncIterator[A]:
        """Send requests and yield answers until either side ends; there is no deadline."""
        method = _method(self._channel.stream_stream, rpc)
        async with _Translating(self.address):
            call = method(_with_mark(rpc.request, requests), metadata=self._metadata)
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                if _is_status_lost(error):
                    raise await _refusal(
                        method(iter(()), metadata=self._metadata), error
                    ) from error
                raise
            finally:
                call.cancel()

    @contextmanager
    def _waiting_for(self, rpc: Rpc[Q, A]) -> Iterator[None]:
        """Count the call as a wait of the service that made this channel."""
        if rpc.is_poll:
            yield
            return
        wait = self._waits.begin(self.address, rpc.path.rpartition("/")[2])
        try:
            yield
        finally:
            self._waits.end(wait)


def _method(kind: Callable[..., Any], rpc: Rpc[Any, Any]) -> Any:
    """Return what calls the rpc; `kind` is the channel's maker for this kind of rpcs."""
    return kind(
        rpc.path,
        request_serializer=rpc.request.SerializeToString,
        response_deserializer=rpc.answer.FromString,
    )


async def _with_mark(kind: Any, requests: AsyncIterator[Q]) -> AsyncIterator[Q]:
    """Yield the requests, and then the mark by which the service knows that it has them all."""
    num_messages = 0
    async for request in requests:
        yield request
        num_messages += 1
    yield kind(end=StreamEnd(num_messages=num_messages))


def _is_status_lost(error: grpc.aio.AioRpcError) -> bool:
    """Return whether grpc.aio may have put this in place of a call's status.

    It does where a send meets the end of its call, as of one that is refused unread.
    """
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST


async def _refusal(asked_again: Any, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Return what refuses the same call without requests, or the error where nothing does."""
    if await asked_again.code() not in _REFUSALS:
        return error
    return grpc.aio.AioRpcError(
        await asked_again.code(),
        await asked_again.initial_metadata(),
        await asked_again.trailing_metadata(),
        await asked_again.details(),
    )


def tell_warnings(answer: Message) -> None:
    """Issue the warnings of a service's answer with Python's `warnings`."""
    for text in getattr(answer, "warnings", ()):
        warnings.warn(text, DialoopWarning, stacklevel=3)


def _connection(address: str, max_message_bytes: int) -> grpc.aio.Channel:
    return open_channel(
        address,
        [
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_metadata_size", 64 * 1024),  # error details travel there
            # Notice a dead server during a long call, and a restarted one soon.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Also how long connecting may take, over a long distance or on a busy machine.
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.enable_retries", 0),  # `retry` decides and counts them
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


class _Translating:
    """Turns gRPC's errors into ours on the way out."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_of(error, address=self._address) from error
        if isinstance(error, (asyncio.CancelledError, grpc.aio.UsageError)) and not _is_cancelled():
            # A closed channel cancels its calls. A task group would take that for a cancelled task
            # and drop the failure.
            raise Unavailable(
                f"The connection to {self._address} was closed.", reason=Reason.CHANNEL_CLOSED
            ) from error


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
