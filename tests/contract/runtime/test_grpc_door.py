"""What servicers and callers rely on at the gRPC door; other facts are in test_in_process.py."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import Calls
from dialoop_services.runtime.grpc_door import GrpcDoor, _Call
from dialoop_services.runtime.handlers import Handlers

_MAX_BYTES = 1000


def unary(method: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, bytes, bytes)


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def join(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([request async for request in requests])


async def spell(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for letter in request.decode():
        yield letter.encode()


async def repeat(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


METHODS = {
    "/t/Echo": unary(echo),
    "/t/Join": grpc.stream_unary_rpc_method_handler(join, bytes, bytes),
    "/t/Spell": grpc.unary_stream_rpc_method_handler(spell, bytes, bytes),
    "/t/Repeat": grpc.stream_stream_rpc_method_handler(repeat, bytes, bytes),
}


@asynccontextmanager
async def open_door(
    methods: Any = METHODS, *, drain_s: float = 1, max_calls: int | None = None
) -> AsyncIterator[tuple[GrpcDoor, grpc.aio.Channel]]:
    """Yield an open door and a channel to it; `methods` are a dict or a function that finds."""
    options = [
        ("grpc.max_receive_message_length", _MAX_BYTES),
        ("grpc.max_send_message_length", _MAX_BYTES),
    ]
    door = GrpcDoor(getattr(methods, "get", methods), options, max_calls=max_calls)
    port = door.listen("127.0.0.1:0", None)
    door.open()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield door, channel
        await door.close(drain_s)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def several(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


async def test_all_four_kinds_of_methods_answer():
    async with open_door() as (_, channel):
        assert await channel.unary_unary("/t/Echo")(b"abc") == b"abc"
        assert await channel.stream_unary("/t/Join")(several(b"a", b"", b"c")) == b"ac"
        assert [a async for a in channel.unary_stream("/t/Spell")(b"abc")] == [b"a", b"b", b"c"]
        repeated = channel.stream_stream("/t/Repeat")(several(b"a", b"b"))
        assert [a async for a in repeated] == [b"a", b"b"]


async def test_many_calls_at_the_same_time_have_their_own_answers():
    async with open_door() as (_, channel):
        call = channel.unary_unary("/t/Echo")
        requests = [str(number).encode() for number in range(1000)]
        assert await asyncio.gather(*map(call, requests)) == requests


def calls_in_memory() -> int:
    gc.collect()
    return sum(type(kept) is _Call for kept in gc.get_objects())


async def test_a_call_that_has_ended_leaves_nothing_behind():
    num_before = calls_in_memory()  # of other tests
    async with open_door() as (door, channel):
        call = channel.unary_unary("/t/Echo")
        await asyncio.gather(*(call(b"a") for _ in range(200)))
        await status_of(channel.unary_unary("/t/Other")(b"a"))
        await status_of(channel.stream_unary("/t/Echo")(several()))
        assert await channel.stream_unary("/t/Join")(several(b"a")) == b"a"
        await asyncio.sleep(0.1)
        assert not door._calls
        assert calls_in_memory() <= num_before


async def test_a_message_is_free_when_the_method_has_it():
    def num_events() -> int:
        return sum(type(kept).__name__ == "BatchOperationEvent" for kept in gc.get_objects())

    async with open_door() as (_, channel):
        call = channel.stream_stream("/t/Repeat")()
        gc.collect()
        gc.disable()  # or Python would look for cycles now and then
        try:
            num_before = num_events()
            for _ in range(100):
                await call.write(b"a")
                assert await call.read() == b"a"
            assert num_events() <= num_before + 10
        finally:
            gc.enable()
        call.cancel()


async def test_a_path_of_no_method_and_a_call_without_a_request_are_refused():
    async with open_door() as (_, channel):
        code, text = await status_of(channel.unary_unary("/t/Other")(b"a"))
        assert (code, text) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        code, text = await status_of(channel.stream_unary("/t/Echo")(several()))
        assert (code, text) == (grpc.StatusCode.UNIMPLEMENTED, "The call ended before its request.")
        assert await channel.unary_unary("/t/Echo")(b"a") == b"a"


async def test_messages_over_the_limit_are_refused_both_ways():
    async def long(request: bytes, context: Any) -> bytes:
        return bytes(_MAX_BYTES + 1)

    async with open_door({**METHODS, "/t/Long": unary(long)}) as (_, channel):
        code, _ = await status_of(channel.unary_unary("/t/Echo")(bytes(_MAX_BYTES + 1)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, _ = await status_of(channel.unary_unary("/t/Long")(b""))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await channel.unary_unary("/t/Echo")(bytes(_MAX_BYTES)) == bytes(_MAX_BYTES)


async def test_a_call_beyond_the_limit_is_refused_until_another_has_ended():
    going = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        await going.wait()
        return request

    async with open_door({"/t/Wait": unary(wait)}, max_calls=1) as (door, channel):
        call = channel.unary_unary("/t/Wait")
        first = asyncio.ensure_future(call(b"1"))
        while not door._calls:
            await asyncio.sleep(0.01)
        code, text = await status_of(call(b"2"))
        assert (code, text) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Concurrent RPC limit exceeded!",
        )
        going.set()
        assert await first == b"1"
        assert await call(b"3") == b"3"


async def fail(request: bytes, context: Any) -> bytes:
    raise ValueError("a secret")


async def abort(request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.NOT_FOUND, "No such thing.", (("why-bin", b"\x00\xff"),))
    raise AssertionError


async def cancel(request: bytes, context: Any) -> bytes:
    raise asyncio.CancelledError


async def test_every_end_of_a_method_has_a_status(caplog):
    methods = {"/t/Fail": unary(fail), "/t/Abort": unary(abort), "/t/Cancel": unary(cancel)}
    async with open_door(methods) as (_, channel):
        code, text = await status_of(channel.unary_unary("/t/Fail")(b""))
        assert code is grpc.StatusCode.INTERNAL
        assert "secret" not in text
        assert "a secret" in caplog.text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t/Abort")(b"")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert tuple(caught.value.trailing_metadata()) == (("why-bin", b"\x00\xff"),)
        code, _ = await status_of(channel.unary_unary("/t/Cancel")(b""))
        assert code is grpc.StatusCode.CANCELLED


async def test_metadata_travels_before_the_answer_too():
    seen: dict[str, Any] = {}

    async def announce(request: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("begun", "1"),))
        return request

    async with open_door({"/t/Announce": unary(announce)}) as (_, channel):
        call = channel.unary_unary("/t/Announce")(b"a", metadata=(("a", "x"), ("b-bin", b"\xff")))
        assert ("begun", "1") in tuple(await call.initial_metadata())
        assert await call == b"a"
    assert (seen["a"], seen["b-bin"]) == ("x", b"\xff")


@pytest.mark.parametrize("timeout_s", [None, 1.0])
@pytest.mark.parametrize("kind", ["waits", "reads", "writes"])
async def test_the_work_stops_when_nobody_waits_for_it(timeout_s: float | None, kind: str):
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def work(requests: Any, context: Any) -> None:
        begun.set()
        try:
            if kind == "waits":
                await asyncio.Event().wait()
            while kind == "writes":  # until the window of the connection is full
                await context.write(bytes(_MAX_BYTES))
            async for _ in requests:
                pass
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    methods = {"/t/Work": grpc.stream_stream_rpc_method_handler(work, bytes, bytes)}
    async with open_door(methods) as (door, channel):
        call = channel.stream_stream("/t/Work")(requests(), timeout=timeout_s)
        await begun.wait()
        if timeout_s is None:
            call.cancel()
        await asyncio.wait_for(stopped.wait(), 10)
        await asyncio.sleep(0)
        assert not door._calls


async def test_a_call_that_ends_before_its_method_begins_leaves_nothing_behind():
    num_begun = 0

    async def work(requests: AsyncIterator[bytes], context: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        await asyncio.Event().wait()

    async def break_off() -> AsyncIterator[bytes]:
        yield b"a"
        raise ValueError

    methods = {"/t/Work": grpc.stream_stream_rpc_method_handler(work, bytes, bytes)}
    async with open_door(methods) as (door, channel):
        for _ in range(50):
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await anext(aiter(channel.stream_stream("/t/Work")(break_off())))
        await asyncio.sleep(0.2)
        assert num_begun > 0
        assert not door._calls


async def test_closing_ends_the_thread_and_frees_the_port():
    names = [thread.name for thread in threading.enumerate()]
    door = GrpcDoor(METHODS.get, [("grpc.so_reuseport", 0)])
    port = door.listen("127.0.0.1:0", None)
    door.open()
    await door.close(0)
    await door.close(0)  # a second time changes nothing
    assert [thread.name for thread in threading.enumerate()] == names
    again = GrpcDoor(METHODS.get, [("grpc.so_reuseport", 0)])
    assert again.listen(f"127.0.0.1:{port}", None) == port
    again.open()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/t/Echo")(b"a") == b"a"
    await again.close(0)


async def test_closing_waits_for_calls_and_then_cuts_them():
    begun = asyncio.Event()
    ends: list[str] = []

    async def work(request: bytes, context: Any) -> bytes:
        begun.set()
        try:
            await asyncio.sleep(float(request))
        except asyncio.CancelledError:
            ends.append("cut")
            raise
        ends.append("done")
        return request

    for seconds, end in ((b"0.2", "done"), (b"60", "cut")):
        begun.clear()
        async with open_door({"/t/Work": unary(work)}, drain_s=0.5) as (_, channel):
            call = asyncio.ensure_future(channel.unary_unary("/t/Work")(seconds))
            await begun.wait()
        assert ends.pop() == end
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("kind", ["reads", "writes", "ends"])
def test_a_method_that_outlives_its_door_does_not_end_the_process(kind: str):
    # In a process of its own: the core would abort it.
    code = f"""
import asyncio, grpc
from dialoop_services.runtime import grpc_door
grpc_door._CLEAN_UP_S = 0.1

async def work(requests, context):
    begun.set()
    while not door.is_shut:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
    await asyncio.sleep(0.1)
    if "{kind}" == "reads":
        async for _ in requests:
            pass
    if "{kind}" == "writes":
        await context.write(b"late")

async def main():
    global door, begun
    begun = asyncio.Event()
    methods = {{"/t/W": grpc.stream_stream_rpc_method_handler(work, bytes, bytes)}}
    door = grpc_door.GrpcDoor(methods.get, [])
    port = door.listen("127.0.0.1:0", None)
    door.open()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        call = channel.stream_stream("/t/W")()
        await call.write(b"a")
        await begun.wait()
        await door.close(0.1)
    await asyncio.sleep(0.5)
    print("alive")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


async def test_a_close_that_is_cancelled_goes_on_to_its_end():
    begun = asyncio.Event()

    async def work(request: bytes, context: Any) -> bytes:
        begun.set()
        await asyncio.sleep(60)
        return request

    async with open_door({"/t/Work": unary(work)}) as (door, channel):
        call = asyncio.ensure_future(channel.unary_unary("/t/Work")(b"a"))
        await begun.wait()
        closing = asyncio.ensure_future(door.close(0.2))
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await door.close(60)  # waits for the first, with its time
        assert not door._waiter.is_alive()
        await asyncio.gather(call, return_exceptions=True)


@pytest.fixture(params=["raw", "in its envelope"])
def find(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], Any]:
    """Return a function that finds methods as they are, or as services have them."""
    if request.param == "raw":
        return lambda methods: methods.get
    handlers = Handlers(Calls(), Token(""))

    def wrap(methods: dict[str, Any]) -> Any:
        handlers.add_registered_method_handlers(
            "t", {path.removeprefix("/t/"): method for path, method in methods.items()}
        )
        return handlers.find

    return wrap


async def test_a_read_that_was_cancelled_is_read_again(find: Any):
    late = asyncio.Event()

    async def work(requests: AsyncIterator[bytes], context: Any) -> bytes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(aiter(requests))
        late.set()
        return b"".join([request async for request in requests])

    async def requests() -> AsyncIterator[bytes]:
        await late.wait()
        yield b"a"
        yield b"b"

    methods = {"/t/Work": grpc.stream_unary_rpc_method_handler(work, bytes, bytes)}
    async with open_door(find(methods)) as (_, channel):
        assert await channel.stream_unary("/t/Work")(requests(), timeout=5) == b"ab"


async def test_an_answer_that_cannot_be_sent_is_an_error_and_no_silence(caplog):
    async def surrogate(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "\ud800")
        raise AssertionError

    async def bad_metadata(request: bytes, context: Any) -> bytes:
        await context.send_initial_metadata((("key", 5),))
        return request

    def no_bytes(answer: bytes) -> str:
        return "text"

    async def long(request: bytes, context: Any) -> bytes:
        return bytes(_MAX_BYTES + 1)

    methods = {
        "/t/Surrogate": unary(surrogate),
        "/t/Text": grpc.unary_unary_rpc_method_handler(echo, bytes, no_bytes),
        "/t/Texts": grpc.unary_stream_rpc_method_handler(spell, bytes, no_bytes),
        "/t/Metadata": unary(bad_metadata),
        "/t/Long": unary(long),
    }
    async with open_door(methods) as (_, channel):
        for path in ("/t/Surrogate", "/t/Text", "/t/Texts", "/t/Metadata"):
            code, _ = await status_of(channel.unary_unary(path)(b"a", timeout=5))
            assert code is grpc.StatusCode.INTERNAL
        await status_of(channel.unary_unary("/t/Long")(b"", timeout=5))
    assert "An answer is larger than a message may be." in caplog.text


async def test_a_stream_that_broke_off_does_not_look_complete():
    ends: list[str] = []
    begun = asyncio.Queue[None]()

    async def count(requests: AsyncIterator[bytes], context: Any) -> bytes:
        try:
            async for _ in requests:
                begun.put_nowait(None)
            ends.append("complete")
        except asyncio.CancelledError:
            ends.append("broken off")
            raise
        return b""

    methods = {"/t/Count": grpc.stream_unary_rpc_method_handler(count, bytes, bytes)}
    async with open_door(methods) as (door, channel):
        calls = [channel.stream_unary("/t/Count")() for _ in range(60)]
        for call in calls:
            await call.write(b"a")
            await begun.get()
        await asyncio.sleep(0.2)
        await door.close(0)
        await asyncio.gather(*calls, return_exceptions=True)
    assert ends == ["broken off"] * 60


async def test_two_tasks_do_not_read_the_same_message():
    async def work(requests: AsyncIterator[bytes], context: Any) -> bytes:
        tasks = [asyncio.ensure_future(anext(aiter(requests))) for _ in range(2)]
        read, refused = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(refused, RuntimeError)
        return bytes(read)

    methods = {"/t/Work": grpc.stream_unary_rpc_method_handler(work, bytes, bytes)}
    async with open_door(methods) as (_, channel):
        assert await channel.stream_unary("/t/Work")(several(b"a"), timeout=5) == b"a"


async def test_a_generator_is_closed_in_its_call(find: Any):
    cleaners: list[Any] = []
    worker: list[Any] = []

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        worker.append(asyncio.current_task())
        try:
            while True:
                yield b"a" * 900
        finally:
            cleaners.append(asyncio.current_task())

    methods = {"/t/Count": grpc.unary_stream_rpc_method_handler(count, bytes, bytes)}
    async with open_door(find(methods)) as (_, channel):
        for _ in range(20):
            call = channel.unary_stream("/t/Count")(b"")
            await call.read()
            call.cancel()
        async with asyncio.timeout(5):
            while len(cleaners) < 20:
                await asyncio.sleep(0.01)
    assert cleaners == worker


def test_an_interrupt_does_not_make_the_door_deaf():
    interrupts = [KeyboardInterrupt]

    def find(path: str) -> Any:
        if interrupts:
            raise interrupts.pop()
        return METHODS.get(path)

    async def begin() -> tuple[GrpcDoor, int]:
        door = GrpcDoor(find, [])
        port = door.listen("127.0.0.1:0", None)
        door.open()
        return door, port

    async def call(port: int) -> bytes:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer: bytes = await channel.unary_unary("/t/Echo")(b"a", timeout=5)
            return answer

    with asyncio.Runner() as runner:
        door, port = runner.run(begin())
        with pytest.raises(KeyboardInterrupt):
            runner.run(call(port))
        assert runner.run(call(port)) == b"a"
        runner.run(door.close(0))


def test_a_loop_that_ends_without_the_door_leaves_no_thread_at_work():
    async def begin() -> tuple[GrpcDoor, int]:
        door = GrpcDoor(METHODS.get, [])
        port = door.listen("127.0.0.1:0", None)
        door.open()
        await asyncio.sleep(0.1)
        return door, port

    door, port = asyncio.run(begin())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/t/Echo")(b"a", timeout=1)
    door._waiter.join(5)
    assert not door._waiter.is_alive()
