from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.interact import InteractiveSessions
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import DeadlineExceeded, NotFound, Unavailable
from dialoop.rollout import play_group
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import SamplingParams, Task
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load

from tests.support.waiting import PATIENCE_S

ENVIRONMENT = arithmetic()
KEY = ENVIRONMENT.tasks.keys("train")[0]
ANSWER = ENVIRONMENT.tasks.get("train", KEY).answer
TASK = Task(
    task_id=KEY,
    environment="arithmetic",
    split="train",
    key=KEY,
    num_trajectories=8,
    sampling=SamplingParams(stop=("<call>", "<submit>")),
)
POLICY = ScriptedPolicy([f"<request><Calculator>{KEY}<call>", f"Result={ANSWER}<submit>"])


@asynccontextmanager
async def connect():
    async with (
        serving(EnvironmentSettings(drain_s=0), Catalogue([ENVIRONMENT])) as server,
        Channel(server.address) as channel,
        InteractiveSessions(channel) as sessions,
    ):
        yield server, sessions


async def test_a_group_is_played_over_one_stream():
    async with connect() as (_, sessions):
        group = await play_group(TASK, sessions=sessions, policy=POLICY, group_id="g")
    assert [t.reward for t in group.trajectories] == [1.0] * 8


async def test_an_item_error_concerns_its_caller_only():
    async with connect() as (_, sessions):
        with pytest.raises(NotFound) as caught:
            await sessions.reset("lost", episode=1, split="train", task_key=KEY)
        assert caught.value.reason == "SESSION_LOST"
        assert await sessions.create_session("s", "arithmetic") > 0
        assert await sessions.close_session("s")


class Whole(stubs.EnvironmentServiceServicer):
    """Closes any session, and notes that a stream was whole."""

    is_whole = False

    async def Interact(self, requests, context):  # noqa: N802
        async for request in requests:
            closed = pb.CloseSessionResponse(closed=True)
            yield pb.InteractResponse(request_id=request.request_id, close_session=closed)
        self.is_whole = True


@pytest.mark.parametrize("num_calls", [0, 3])
async def test_leaving_ends_the_stream_by_its_mark(num_calls):
    server, servicer = GrpcServer(load(ServerSettings, drain_s=0)), Whole()
    server.add(stubs.add_EnvironmentServiceServicer_to_server, servicer, "x")
    async with server, Channel(server.address) as channel:
        async with InteractiveSessions(channel) as sessions:
            for number in range(num_calls):
                await sessions.close_session(f"s{number}")
        assert servicer.is_whole


class Silent(stubs.EnvironmentServiceServicer):
    """Reads and says nothing."""

    async def Interact(self, requests, context):  # noqa: N802
        async for _ in requests:
            pass
        return
        yield


@asynccontextmanager
async def silent(deadline_s: float):
    server = GrpcServer(load(ServerSettings, drain_s=0))
    server.add(stubs.add_EnvironmentServiceServicer_to_server, Silent(), "x")
    async with (
        server,
        Channel(server.address) as channel,
        InteractiveSessions(channel, deadline_s=deadline_s) as sessions,
    ):
        yield channel, sessions


async def test_a_missing_answer_is_a_deadline_exceeded():
    async with silent(deadline_s=0.1) as (_, sessions):
        with pytest.raises(DeadlineExceeded):
            await sessions.close_session("s")


async def test_a_broken_stream_fails_those_who_wait_and_those_who_come():
    async with silent(deadline_s=30) as (channel, sessions):
        waiting = asyncio.create_task(sessions.close_session("s"))
        await asyncio.sleep(0.1)
        await channel.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(Unavailable):
            await sessions.close_session("s")
