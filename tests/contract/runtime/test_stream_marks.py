"""A stream of requests counts as whole by its mark alone, however it broke off."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from dialoop.clients.channel import Channel, Rpc
from dialoop.clients.interact import INTERACT
from dialoop.errors import DialoopError, InvalidInput
from dialoop.v1 import environment_service_pb2 as pb
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.support.rest_world import service
from tests.support.samples.scoped_services import descriptors
from tests.support.waiting import PATIENCE_S

STREAMS = [rpc for service in descriptors() for rpc in service.methods if rpc.client_streaming]
NUM_STREAMS = 320
NUM_AT_A_TIME = 20
each_stream = pytest.mark.parametrize("rpc", STREAMS, ids=lambda rpc: str(rpc.name))


class Reader:
    """Reads the requests of a stream, and counts the streams that it takes for whole."""

    def __init__(self, rpc: MethodDescriptor) -> None:
        self.num_begun = self.num_reading = self.num_whole = 0
        self._answer = GetMessageClass(rpc.output_type)
        module = rpc.containing_service.file.name.removesuffix(".proto").replace("/", ".")
        self._stubs = __import__(f"{module}_pb2_grpc", fromlist=["*"])
        self._service, self._method = rpc.containing_service, rpc.name

    async def read(self, _: Any, requests: AsyncIterator[Message], context: Any) -> Message:
        self.num_begun += 1
        self.num_reading += 1
        try:
            async for _ in requests:
                pass
            self.num_whole += 1
        finally:
            self.num_reading -= 1
        return self._answer()

    def add_to(self, server: GrpcServer) -> None:
        base = getattr(self._stubs, f"{self._service.name}Servicer")
        reader = self

        async def read(servicer: Any, requests: Any, context: Any) -> Message:
            return await reader.read(servicer, requests, context)

        servicer = type("Reading", (base,), {self._method: read})()
        register = getattr(self._stubs, f"add_{self._service.name}Servicer_to_server")
        server.add(register, servicer, self._service.full_name)


@asynccontextmanager
async def reading(rpc: MethodDescriptor) -> AsyncIterator[tuple[Reader, GrpcServer]]:
    server, reader = GrpcServer(load(ServerSettings, drain_s=0)), Reader(rpc)
    reader.add_to(server)
    async with server:
        yield reader, server


class Relay:
    """Connections to a server, which `cut` breaks off without a word to either side."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumping: set[asyncio.Task[None]] = set()
        self._is_cut = False

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._pumping, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, to_server]
        if self._is_cut:
            self.cut()
        for source, target in ((reader, to_server), (from_server, writer)):
            self._pumping.add(asyncio.create_task(self._pump(source, target)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)


def open_stream(channel: grpc.aio.Channel, rpc: MethodDescriptor, requests: Any) -> Any:
    kind = channel.stream_stream if rpc.server_streaming else channel.stream_unary
    return kind(f"/{rpc.containing_service.full_name}/{rpc.name}")(requests)


async def some_requests(rpc: MethodDescriptor, chance: random.Random) -> AsyncIterator[bytes]:
    """Send some messages, and then nothing more."""
    content = GetMessageClass(rpc.input_type)().SerializeToString()
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(chance.random() * 0.005)
        yield content
    await asyncio.Event().wait()


async def break_off(server: GrpcServer, rpc: MethodDescriptor, chance: random.Random) -> None:
    """Begin some streams, and break them off after a while in one of three ways."""
    async with Relay(server.address) as relay:
        way = chance.choice(["cut", "cancel", "close"])
        channel = grpc.aio.insecure_channel(relay.address)
        requests = [some_requests(rpc, chance) for _ in range(NUM_AT_A_TIME)]
        calls = [open_stream(channel, rpc, each) for each in requests]
        await asyncio.sleep(0.02 + chance.random() * 0.06)
        if way == "cut":
            relay.cut()
        for call in calls if way == "cancel" else ():
            await asyncio.sleep(chance.random() * 0.002)
            call.cancel()
        if way != "close":
            await asyncio.gather(*(call.code() for call in calls))
        await channel.close()


@each_stream
async def test_a_stream_that_broke_off_is_never_taken_for_whole(rpc: MethodDescriptor) -> None:
    chance = random.Random(rpc.name)
    async with reading(rpc) as (reader, server):
        while reader.num_begun < NUM_STREAMS:
            await break_off(server, rpc, chance)
        async with asyncio.timeout(PATIENCE_S):
            while reader.num_reading:
                await asyncio.sleep(0.01)
    assert reader.num_whole == 0


async def test_a_caller_who_leaves_amid_answers_is_no_error_of_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def requests() -> AsyncIterator[pb.InteractRequest]:
        create = pb.CreateSessionRequest(session_id="s", environment="arithmetic")
        yield pb.InteractRequest(create_session=create)
        for episode in itertools.count(1):
            step = pb.StepRequest(session_id="s", episode=episode)
            reset = pb.ResetRequest(session_id="s", episode=episode, query="3+4?")
            yield pb.InteractRequest(request_id="x" * 5000, reset=reset)
            for _ in range(3):
                yield pb.InteractRequest(request_id="x" * 5000, step=step)

    async with service("environment") as server:
        for _ in range(20):
            async with Relay(server.address) as relay, Channel(relay.address) as channel:
                answers = channel.exchange(INTERACT, requests())
                for _ in range(10):
                    await anext(answers)
                relay.cut()
                with pytest.raises(DialoopError):
                    _ = [answer async for answer in answers]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def status_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(PATIENCE_S):
        code: grpc.StatusCode = await call.code()
    return code


async def answer_to(server: GrpcServer, rpc: MethodDescriptor, *messages: Message) -> Any:
    """Send messages as they are, and end the stream; return the call once it has its status."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(channel, rpc, iter([each.SerializeToString() for each in messages]))
        await status_of(call)
        return call


@each_stream
async def test_a_stream_with_its_mark_is_whole(rpc: MethodDescriptor) -> None:
    kind = GetMessageClass(rpc.input_type)
    async with reading(rpc) as (reader, server):
        for num_messages in (0, 1, 7):
            messages = [*(kind() for _ in range(num_messages)), mark(kind, num_messages)]
            call = await answer_to(server, rpc, *messages)
            assert await call.code() is grpc.StatusCode.OK
        assert reader.num_whole == 3


def mark(kind: Any, num_messages: int) -> Message:
    message: Message = kind(end={"num_messages": num_messages})
    return message


@each_stream
async def test_a_stream_without_its_mark_gets_one_error_with_the_remedy(
    rpc: MethodDescriptor,
) -> None:
    kind = GetMessageClass(rpc.input_type)
    streams = {
        "ended without its mark": (kind(), kind()),  # as clients of the first v1 sent it
        "2 messages of": (kind(), mark(kind, 2)),
        "0 messages of": (kind(), mark(kind, 0)),
        "went on after its mark": (kind(), mark(kind, 1), kind()),
    }
    async with reading(rpc) as (reader, server):
        for text, messages in streams.items():
            call = await answer_to(server, rpc, *messages)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in await call.details()
    assert reader.num_whole == 0


@each_stream
async def test_the_error_of_a_missing_mark_names_reason_and_remedy(
    rpc: MethodDescriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unmarked(_: Any, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for request in requests:
            yield request

    async def requests() -> AsyncIterator[Message]:
        yield GetMessageClass(rpc.input_type)()

    monkeypatch.setattr("dialoop.clients.channel._with_mark", unmarked)
    called: Rpc[Any, Any] = Rpc(
        f"/{rpc.containing_service.full_name}/{rpc.name}",
        GetMessageClass(rpc.input_type),
        GetMessageClass(rpc.output_type),
    )
    async with reading(rpc) as (_, server), Channel(server.address) as channel:
        answers = channel.exchange(called, requests())
        with pytest.raises(InvalidInput) as caught:
            await (anext(answers) if rpc.server_streaming else channel.upload(called, requests()))
    assert caught.value.reason == "STREAM_CUT"
    assert "install the service's version" in caught.value.remedy


def test_the_streams_of_the_protos_are_all_here() -> None:
    assert {rpc.name for rpc in STREAMS} == {"Interact", "LoadWeights"}
