from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dialoop import errors
from dialoop.clients import (
    environment,
    inference,
    interact,
    recordings,
    replay,
    scorer,
    template,
    trainer,
)
from dialoop.clients.channel import Channel, Rpc
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient, WeightsManifest
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.sequences import PolicyVersion
from dialoop.v1 import (
    environment_service_pb2,
    environment_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    replay_service_pb2,
    replay_service_pb2_grpc,
    scorer_service_pb2,
    template_service_pb2,
    trainer_service_pb2,
)
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load

from tests.support.connections import connection_to, copy, serving_connections
from tests.support.waiting import PATIENCE_S

KINDS = sorted({*errors.ERRORS_BY_STATUS.values()} - {errors.InternalError}, key=lambda k: k.status)
ONCE = RetryPolicy(max_attempts=1)
SOON = RetryPolicy(max_attempts=3, first_wait_s=0.01)
MANIFEST = WeightsManifest(
    policy_version=PolicyVersion(lineage="main", number=1), sha256="ab", num_bytes=3
)


class Answers(
    environment_service_pb2_grpc.EnvironmentServiceServicer,
    inference_service_pb2_grpc.InferenceServiceServicer,
    replay_service_pb2_grpc.ReplayServiceServicer,
):
    """Raises the given errors one after the other, then answers."""

    def __init__(self, *raised: Exception, seconds: float = 0) -> None:
        self.raised = list(raised)
        self.seconds = seconds
        self.num_calls = 0
        self.received = b""

    async def _answer(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(self.seconds)
        if self.raised:
            raise self.raised.pop(0)

    async def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._answer()
        return environment_service_pb2.CloseSessionResponse(closed=True)

    async def LoadWeights(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await self._answer()
        async for request in requests:
            self.received += request.chunk
        return inference_service_pb2.LoadWeightsResponse(load_s=2.0)

    async def OfferTasks(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._answer()
        return replay_service_pb2.OfferTasksResponse()

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield replay_service_pb2.WatchResponse(stats={"credits": 1})
        await self._answer()
        yield replay_service_pb2.WatchResponse(stats={"credits": 2})


@asynccontextmanager
async def connect(answers: Answers, *, retry: RetryPolicy = ONCE, token: str = "", **options: Any):
    server = GrpcServer(load(ServerSettings, drain_s=0, **options))
    for module, name in (
        (environment_service_pb2_grpc, "Environment"),
        (inference_service_pb2_grpc, "Inference"),
        (replay_service_pb2_grpc, "Replay"),
    ):
        register = getattr(module, f"add_{name}ServiceServicer_to_server")
        server.add(register, answers, f"dialoop.v1.{name}Service")
    async with server, Channel(server.address, retry=retry, token=token) as channel:
        yield channel


async def close(channel: Channel) -> bool:
    return await EnvironmentClient(channel).close_session("s")


async def upload(channel: Channel) -> float:
    return (await InferenceClient(channel).load_weights(MANIFEST, [b"a", b"bc"])).load_s


async def watch(channel: Channel) -> list[int]:
    return [stats.credits async for stats in ReplayClient(channel).watch("r")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [close, upload, watch])
async def test_an_error_arrives_as_the_class_that_was_raised(kind, call):
    error = kind("Wrong.", reason="SOME_REASON", remedy="Do this.")
    async with connect(Answers(error)) as channel:
        with pytest.raises(kind) as caught:
            await call(channel)
    assert type(caught.value) is kind
    assert caught.value.message == "Wrong."
    assert (caught.value.reason, caught.value.remedy) == ("SOME_REASON", "Do this.")


async def test_an_upload_that_is_refused_while_it_is_sent_gets_the_servers_error():
    errors_raised = [errors.NotFound("Wrong.", reason="SOME_REASON") for _ in range(20)]
    async with connect(Answers(*errors_raised)) as channel:
        for _ in errors_raised:
            with pytest.raises(errors.NotFound):
                await InferenceClient(channel).load_weights(MANIFEST, [b"a" * 1000] * 200)


async def test_a_server_that_is_slow_to_greet_is_waited_for():
    """A long way, or a machine that is busy: the first bytes come after a second."""

    async def late(reader, writer):
        await asyncio.sleep(1.0)
        async with connection_to(int(upstream.address.split(":")[1])) as there:
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    async with (
        connect(Answers()) as upstream,
        serving_connections(late) as address,
        Channel(address, retry=ONCE) as channel,
    ):
        assert await close(channel)


async def test_an_unexpected_error_arrives_as_an_internal_error_with_an_id():
    async with connect(Answers(RuntimeError("secret"))) as channel:
        with pytest.raises(errors.InternalError, match=r"Internal error [0-9a-f]{32}") as caught:
            await close(channel)
    assert "secret" not in str(caught.value)


async def test_calls_that_succeed_answer():
    answers = Answers()
    async with connect(answers) as channel:
        assert await close(channel)
        assert await upload(channel) == 2.0
        assert await watch(channel) == [1, 2]
    assert answers.received == b"abc"


async def test_a_retryable_error_is_retried_until_it_passes():
    answers = Answers(errors.Unavailable("Not now."), errors.Busy("Nor now."))
    async with connect(answers, retry=SOON) as channel:
        assert await close(channel)
    assert answers.num_calls == 3


async def test_retries_are_bounded_and_the_last_error_comes_out():
    answers = Answers(*(errors.Unavailable(f"Not now: {n}.") for n in range(9)))
    async with connect(answers, retry=SOON) as channel:
        with pytest.raises(errors.Unavailable, match="Not now: 2"):
            await close(channel)
    assert answers.num_calls == 3


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (close, errors.NotFound("Never.")),
        (upload, errors.Unavailable("Not now.")),
        (watch, errors.Unavailable("Not now.")),
    ],
)
async def test_what_would_do_harm_or_no_good_is_not_retried(call, error):
    answers = Answers(error)
    async with connect(answers, retry=SOON) as channel:
        with pytest.raises(type(error)):
            await call(channel)
    assert answers.num_calls == 1


async def test_a_cursor_that_moved_is_not_asked_for_again():
    answers = Answers(errors.Busy("Moved.", reason="CURSOR_MOVED"))
    async with connect(answers, retry=SOON) as channel:
        with pytest.raises(errors.Busy):
            await ReplayClient(channel).offer_tasks("r", [])
    assert answers.num_calls == 1


async def test_the_deadline_covers_all_attempts():
    answers = Answers(*(errors.Unavailable("Not now.") for _ in range(99)), seconds=0.05)
    retry = RetryPolicy(max_attempts=99, first_wait_s=0.05, max_wait_s=0.05)
    async with connect(answers, retry=retry) as channel:
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
            await channel.call(
                environment.CLOSE_SESSION,
                environment_service_pb2.CloseSessionRequest(),
                deadline_s=0.3,
            )
    assert answers.num_calls < 10


async def test_a_slow_answer_is_a_deadline_exceeded():
    async with connect(Answers(seconds=30)) as channel:
        with pytest.raises(errors.DeadlineExceeded):
            await channel.call(
                environment.CLOSE_SESSION,
                environment_service_pb2.CloseSessionRequest(),
                deadline_s=0.1,
            )


async def test_nobody_listening_is_unavailable_and_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with Channel(address, retry=ONCE) as channel:
            with pytest.raises(errors.Unavailable, match=address):
                await close(channel)
            with pytest.raises(errors.Unavailable, match="did not answer"):
                await channel.wait_until_connected(timeout_s=0.2)


async def test_a_service_that_comes_back_is_reached_again():
    async with connect(Answers()) as channel:
        await close(channel)
    port = int(channel.address.rpartition(":")[2])
    async with Channel(channel.address, retry=ONCE) as again:
        with pytest.raises(errors.Unavailable):
            await close(again)
        async with connect(Answers(), port=port):
            await again.wait_until_connected(timeout_s=PATIENCE_S)
            assert await close(again)


async def test_a_message_over_the_limit_is_named_and_not_retried():
    answers = Answers()
    async with connect(answers, retry=SOON, max_message_bytes=1024) as channel:
        with pytest.raises(errors.CapacityExhausted) as caught:
            await EnvironmentClient(channel).close_session("x" * 5000)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


async def test_the_channels_token_is_sent():
    answers = Answers()
    server = GrpcServer(load(ServerSettings, token="right", drain_s=0))
    server.add(environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server, answers, "x")
    async with server:
        async with Channel(server.address, token="right") as channel:
            assert await close(channel)
        async with Channel(server.address, token="wrong", retry=SOON) as channel:
            with pytest.raises(errors.Unauthenticated):
                await close(channel)
    assert answers.num_calls == 1


async def test_cancelling_a_call_cancels_it():
    async with connect(Answers(seconds=30)) as channel:
        call = asyncio.create_task(close(channel))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize("call", [close, upload, watch])
async def test_closing_the_channel_fails_its_calls_and_does_not_cancel_their_tasks(call):
    async with connect(Answers(seconds=30)) as channel:
        task = asyncio.create_task(call(channel))
        await asyncio.sleep(0.1)
        await channel.close()
        with pytest.raises(errors.Unavailable) as caught:
            await asyncio.wait_for(task, PATIENCE_S)
    assert caught.value.reason == "CHANNEL_CLOSED"


async def test_a_stream_may_be_left_early():
    async with connect(Answers(seconds=30)) as channel:
        async for stats in ReplayClient(channel).watch("r"):
            assert stats.credits == 1
            break


def test_waits_grow_up_to_a_limit():
    retry = RetryPolicy(first_wait_s=0.1, max_wait_s=0.5)
    assert [retry.wait_s(n, 1.0) for n in (1, 2, 3, 4, 5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert retry.wait_s(1, 0.0) == 0.05


MODULES = (environment, inference, interact, recordings, replay, scorer, template, trainer)


def test_every_rpc_has_its_client_and_its_messages():
    rpcs = {
        rpc.path: rpc for module in MODULES for rpc in vars(module).values() if isinstance(rpc, Rpc)
    }
    files = (
        environment_service_pb2,
        inference_service_pb2,
        template_service_pb2,
        replay_service_pb2,
        scorer_service_pb2,
        trainer_service_pb2,
    )
    methods = {
        f"/{service.full_name}/{method.name}": method
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(rpcs) == set(methods)
    for path, rpc in rpcs.items():
        assert rpc.request.DESCRIPTOR is methods[path].input_type
        assert rpc.answer.DESCRIPTOR is methods[path].output_type
