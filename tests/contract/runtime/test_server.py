from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import grpc
import pytest
from dialoop import errors
from dialoop.clients.channel import Channel, Rpc
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, handlers, load
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from tests.support.rest_world import http_of, refusal
from tests.support.waiting import PATIENCE_S

NAME = "dialoop.v1.EnvironmentService"
KINDS = sorted({*errors.ERRORS_BY_STATUS.values()} - {errors.InternalError}, key=lambda k: k.status)


class Raising(stubs.EnvironmentServiceServicer):
    """Raises what it was given, from a unary and from a streaming rpc."""

    def __init__(self, error: Exception | None = None, seconds: float = 0) -> None:
        self.error = error
        self.seconds = seconds
        self.started = asyncio.Event()

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        self.started.set()
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return pb.CloseSessionResponse(closed=True)

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:  # noqa: N802
        async for request in requests:
            yield pb.InteractResponse(request_id=request.request_id)
        if self.error:
            raise self.error


def serving(servicer: Raising, **settings: Any) -> GrpcServer:
    server = GrpcServer(load(ServerSettings, **settings))
    server.add(stubs.add_EnvironmentServiceServicer_to_server, servicer, NAME)
    return server


async def close(server: GrpcServer, token: str = "") -> pb.CloseSessionResponse:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = stubs.EnvironmentServiceStub(channel)
        return await stub.CloseSession(pb.CloseSessionRequest(), metadata=metadata)


async def interact(server: GrpcServer) -> list[str]:
    async def requests() -> AsyncIterator[pb.InteractRequest]:
        yield pb.InteractRequest(request_id="a")
        yield pb.InteractRequest(end={"num_messages": 1})

    async with grpc.aio.insecure_channel(server.address) as channel:
        answers = stubs.EnvironmentServiceStub(channel).Interact(requests())
        return [answer.request_id async for answer in answers]


def info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(SyncView(error)).details[0].Unpack(info)
    return info


class SyncView:
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [close, interact])
async def test_an_error_crosses_the_wire_with_status_reason_and_remedy(kind, call):
    async with serving(Raising(kind("Wrong -> ünïcode.", reason="SOME_REASON", remedy="Do."))) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(s)
    assert caught.value.code().value[0] == kind.status
    assert caught.value.details() == "Wrong -> ünïcode."
    info = info_of(caught.value)
    assert (info.reason, info.domain, info.metadata["remedy"]) == ("SOME_REASON", "dialoop", "Do.")


@pytest.mark.parametrize("error", [RuntimeError("secret"), errors.InternalError("secret")])
@pytest.mark.parametrize("call", [close, interact])
async def test_the_text_of_an_unexpected_error_stays_in_the_log(error, call, caplog):
    async with serving(Raising(error)) as server:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(server)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(caught.value)
    (record,) = caplog.records
    assert record.error_id in caught.value.details()
    assert "secret" in caplog.text


@pytest.mark.parametrize("character", ["ü", "世", "\n", "x", "\ud800"])
async def test_a_very_long_message_still_arrives_with_its_reason(character):
    text = character * 9000
    async with serving(Raising(errors.InvalidInput(text, remedy=text))) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await close(server)
    assert info_of(caught.value).reason == "INVALID_INPUT"


async def test_a_refused_request_does_not_stay_until_python_looks_for_circles():
    """Nor as long as gRPC holds the last call: it may have 64 MiB."""
    errors_of_calls: list[weakref.ref[errors.InvalidInput]] = []

    class Refusing(Raising):
        async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
            raise self.made()

        def made(self) -> errors.InvalidInput:
            error = errors.InvalidInput("No.")
            errors_of_calls.append(weakref.ref(error))
            return error

    def frames() -> list[FrameType]:
        all_frames = [each for each in gc.get_objects() if type(each) is FrameType]
        return [each for each in all_frames if each.f_code.co_filename == handlers.__file__]

    earlier = set(frames())
    gc.disable()
    try:
        async with serving(Refusing()) as server:
            with pytest.raises(grpc.aio.AioRpcError):
                await close(server)
            (error,) = errors_of_calls
            assert error() is None  # with all frames on its way
            assert not [f for f in frames() if f not in earlier and "request" in f.f_locals]
    finally:
        gc.enable()


async def test_a_stream_that_ends_well_delivers_its_messages():
    async with serving(Raising()) as server:
        assert await interact(server) == ["a"]


@pytest.mark.parametrize("token", ["", "wrong", "rightt"])
async def test_a_wrong_token_is_refused(token):
    async with serving(Raising(), token="right") as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await close(server, token)
    assert info_of(caught.value).reason == "UNAUTHENTICATED"


async def test_the_right_token_passes():
    async with serving(Raising(), token="right") as server:
        assert (await close(server, "right")).closed


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("token", ["", "right"])
async def test_reflection_needs_the_token_too(token, version):
    async with (
        serving(Raising(), token="right") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        list_services = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        reflect = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = reflect(list_services, metadata=(("authorization", f"Bearer {token}"),))
        if token:
            (answer,) = [answer async for answer in answers]
            assert NAME in [s.name for s in answer.list_services_response.service]
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(answers))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("RegistryService/ListMembers", "ListInstances"),
        ("EnvironmentService/RunText", "RunService.RunText"),
        ("ReplayService/Nothing", "Call a service that serves it."),
    ],
)
async def test_a_rpc_that_is_not_here_says_where_it_is(path, where):
    rpc = Rpc(f"/dialoop.v1.{path}", pb.GetSessionRequest, pb.GetSessionResponse)
    async with serving(Raising()) as server, Channel(server.address) as channel:
        with pytest.raises(errors.Unsupported) as caught:
            await channel.call(rpc, pb.GetSessionRequest(session_id="s"))
    assert caught.value.reason == "NOT_SERVED"
    assert where in caught.value.remedy


async def test_a_rpc_that_nobody_wrote_is_not_served():
    async with (
        serving(stubs.EnvironmentServiceServicer(), rest_port=0) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        http_of(server) as http,
    ):
        stub = stubs.EnvironmentServiceStub(channel)
        for call in (
            stub.CloseSession(pb.CloseSessionRequest()),
            stub.Interact(iter([pb.InteractRequest()])).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert info_of(caught.value).reason == "NOT_SERVED"
        assert refusal(await http.get("/v1/environments")) == (501, "NOT_SERVED")


class Aborting(stubs.EnvironmentServiceServicer):
    """Ends its calls as gRPC's own examples do."""

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        await context.abort(grpc.StatusCode.NOT_FOUND, "No such thing.")
        raise AssertionError("abort returned")


async def test_an_abort_has_its_status_through_both_doors(caplog):
    async with (
        serving(Aborting(), rest_port=0) as server,
        http_of(server) as http,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await close(server)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        answer = await http.delete("/v1/sessions/s")
        assert answer.status_code == 404
        assert answer.json()["detail"] == "No such thing."
        for door in ("grpc", "rest"):
            counted = 'rpc="EnvironmentService.CloseSession",status="NOT_FOUND"'
            assert (
                f'dialoop_calls_total{{door="{door}",{counted}}} 1.0'
                in (await http.get("/metrics")).text
            )


async def test_a_health_check_needs_no_token_and_follows_set_serving():
    async with (
        serving(Raising(), token="right") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", NAME):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await health.Check(request)).status == 1
            await server.set_serving(False)
            assert (await health.Check(request)).status == 2
            await server.set_serving(True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_listening_beyond_loopback_without_a_token_is_refused(host):
    with pytest.raises(errors.InvalidConfig, match="without a token"):
        GrpcServer(load(ServerSettings, host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
async def test_loopback_needs_no_token(host):
    async with serving(Raising(), host=host) as server:
        assert server.port > 0


async def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.InvalidConfig, match=f"Port {port} on 127.0.0.1 is taken"):
            await serving(Raising(), port=port).__aenter__()


async def test_leaving_finishes_calls_in_flight():
    servicer = Raising(seconds=0.3)
    async with asyncio.TaskGroup() as tasks:
        async with serving(servicer, drain_s=PATIENCE_S) as server:
            call = tasks.create_task(close(server))
            await servicer.started.wait()
        assert (await call).closed


async def test_a_drain_that_takes_too_long_is_cut():
    servicer = Raising(seconds=30)
    async with serving(servicer, drain_s=0.1) as server:
        call = asyncio.create_task(close(server))
        await servicer.started.wait()
    with pytest.raises(grpc.aio.AioRpcError):
        await call


async def test_stop_ends_the_wait():
    async with serving(Raising()) as server:
        server.stop()
        await asyncio.wait_for(server.wait_until_stopped(), PATIENCE_S)
        assert server.stopping.is_set()


async def test_a_message_over_the_limit_is_refused():
    async with (
        serving(Raising(), max_message_bytes=1024) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = stubs.EnvironmentServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CloseSession(pb.CloseSessionRequest(session_id="x" * 5000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_message_of_a_caller_without_a_right_is_not_read():
    # A message that is read is refused for its size.
    request = pb.CloseSessionRequest(session_id="x" * 5000)
    async with (
        serving(Raising(), max_message_bytes=1024, token="right") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = stubs.EnvironmentServiceStub(channel)
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.CloseSession(request)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("num_requests", [0, 3, 1000])
async def test_a_stream_of_a_caller_without_a_right_has_its_status(num_requests):
    async def requests() -> AsyncIterator[pb.InteractRequest]:
        for _ in range(num_requests):
            yield pb.InteractRequest(request_id="x" * 1000)

    rpc = Rpc(f"/{NAME}/Interact", pb.InteractRequest, pb.InteractResponse)
    async with serving(Raising(), token="right") as server, Channel(server.address) as channel:
        for _ in range(20):
            # Nothing of it is read, so that grpc.aio may lose the status. The client asks again.
            with pytest.raises(errors.Unauthenticated):
                async for _ in channel.exchange(rpc, requests()):
                    pass
            with pytest.raises(errors.Unauthenticated):
                await channel.upload(rpc, requests())


async def test_a_call_beyond_the_limit_is_refused_until_another_has_ended():
    servicer = Raising(seconds=0.5)
    async with (
        serving(servicer, max_calls=1) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = stubs.EnvironmentServiceStub(channel)
        first = asyncio.ensure_future(stub.CloseSession(pb.CloseSessionRequest()))
        await servicer.started.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CloseSession(pb.CloseSessionRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await first).closed
        servicer.seconds = 0
        assert (await stub.CloseSession(pb.CloseSessionRequest())).closed


class Cancelling(stubs.EnvironmentServiceServicer):
    """Waits for something that is cancelled."""

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:  # noqa: N802
        raise asyncio.CancelledError


async def test_a_method_that_is_cancelled_from_within_ends_its_call():
    async with serving(Cancelling()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(close(server), PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


class Long(stubs.EnvironmentServiceServicer):
    """Answers with more than a message may hold."""

    async def GetSession(self, request: Any, context: Any) -> pb.GetSessionResponse:  # noqa: N802
        return pb.GetSessionResponse(environment="x" * 5000)

    async def Interact(self, requests: Any, context: Any) -> AsyncIterator[pb.InteractResponse]:  # noqa: N802
        yield pb.InteractResponse(request_id="x" * 5000)


async def test_an_answer_over_the_limit_is_refused_and_the_service_says_so(caplog):
    async with (
        serving(Long(), max_message_bytes=1024, max_large_message_bytes=1024) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = stubs.EnvironmentServiceStub(channel)
        for call in (stub.GetSession(pb.GetSessionRequest()), stub.Interact(iter(()))):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "EnvironmentService/GetSession" in caplog.text
    assert "EnvironmentService/Interact" in caplog.text
