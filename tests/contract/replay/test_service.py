"""The replay service over gRPC: the loop's round trip, errors, watching, start and end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
from dialoop.sequences import Along
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.v1.replay_service_pb2_grpc import (
    ReplayServiceStub,
    add_ReplayServiceServicer_to_server,
)
from dialoop.wire.sequences import column_to_proto
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import ServerSettings
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.samples.replay_samples import make_group, make_task, set_values, with_advantages
from tests.support.waiting import PATIENCE_S


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def replay(request: pytest.FixtureRequest) -> AsyncIterator[ReplayServiceStub]:
    limits = QueueLimits(lease_s=60)
    store = (
        ModelStore(limits)
        if request.param == "memory"
        else RedisStore(request.getfixturevalue("redis_url"), limits)
    )
    servicer = ReplayServicer(store, vocab_size=lambda: 100)
    server = GrpcServer(ServerSettings(drain_s=1))
    server.add(
        add_ReplayServiceServicer_to_server,
        servicer,
        "dialoop.v1.ReplayService",
    )
    async with server, grpc.aio.insecure_channel(server.address) as channel:
        yield ReplayServiceStub(channel)
        servicer.stop_waiting()
    await store.close()


@pytest.fixture
def run() -> str:
    return new_run()


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


async def advance(replay: ReplayServiceStub, run: str, number: int, *trained: str) -> int:
    response = await replay.AdvancePolicy(
        pb.AdvancePolicyRequest(
            run=run,
            policy_version=trajectory_pb2.PolicyVersion(lineage="main", number=number),
            trained_lease_ids=trained,
            max_outstanding_groups=2,
        )
    )
    return response.credits


async def append(
    replay: ReplayServiceStub, run: str, stage: int, group: trajectory_pb2.Group, lease_id: str
) -> pb.AppendOutcome:
    item = pb.AppendItem(group=group, lease_id=lease_id)
    response = await replay.AppendGroups(
        pb.AppendGroupsRequest(run=run, stage=stage, items=[item])  # type: ignore[arg-type]
    )
    return response.outcomes[0]


async def lease_groups(replay: ReplayServiceStub, run: str, stage: int) -> pb.LeaseGroupsResponse:
    return await replay.LeaseGroups(
        pb.LeaseGroupsRequest(run=run, stage=stage, worker="w", max_groups=4, wait_s=5)  # type: ignore[arg-type]
    )


async def acknowledge(replay: ReplayServiceStub, run: str, lease_id: str) -> bool:
    item = pb.AcknowledgeItem(lease_id=lease_id, outcome=pb.OUTCOME_CONSUMED)
    response = await replay.Acknowledge(pb.AcknowledgeRequest(run=run, items=[item]))
    return response.outcomes[0].acknowledged


async def test_a_task_goes_through_the_whole_loop(replay: ReplayServiceStub, run: str) -> None:
    task = make_task("arithmetic/0")
    await replay.OfferTasks(pb.OfferTasksRequest(run=run, tasks=[task], next_cursor="1"))
    assert await advance(replay, run, 0) == 2
    tasks = await replay.LeaseTasks(
        pb.LeaseTasksRequest(run=run, worker="c", max_tasks=4, wait_s=5)
    )
    (held,) = tasks.leases
    assert (held.task, held.attempt, held.expires_in_s) == (task, 1, 60)
    assert (tasks.credits, tasks.cursor) == (1, "1")
    group = make_group(task)
    outcome = await append(replay, run, pb_stage("UNSCORED"), group, held.lease_id)
    assert outcome.status == pb.APPEND_STATUS_APPENDED
    (to_score,) = (await lease_groups(replay, run, pb_stage("UNSCORED"))).leases
    assert to_score.group == group
    done = with_advantages(group)
    await append(replay, run, pb_stage("SCORED"), done, to_score.lease_id)
    assert await acknowledge(replay, run, to_score.lease_id)
    peeked = await replay.Peek(pb.PeekRequest(run=run, stage=2))  # type: ignore[arg-type]
    assert list(peeked.groups) == [done]
    (to_train,) = (await lease_groups(replay, run, pb_stage("SCORED"))).leases
    assert to_train.group == done
    assert await advance(replay, run, 1, to_train.lease_id) == 2
    assert await acknowledge(replay, run, to_train.lease_id)
    stats = (await replay.GetStats(pb.GetStatsRequest(run=run))).stats
    assert stats.training.num_groups_consumed == 1
    assert stats.training.num_trajectories_consumed == 2
    assert stats.policy_version.number == 1
    await replay.Purge(pb.PurgeRequest(run=run, confirm=run))


def pb_stage(name: str) -> int:
    return trajectory_pb2.Stage.Value(f"STAGE_{name}")


async def test_a_column_of_any_name_comes_out_at_the_lease(
    replay: ReplayServiceStub, run: str
) -> None:
    task = make_task("a")
    await replay.AdvancePolicy(
        pb.AdvancePolicyRequest(
            run=run,
            policy_version=trajectory_pb2.PolicyVersion(lineage="main", number=0),
            max_outstanding_groups=4,
        )
    )
    await replay.OfferTasks(pb.OfferTasksRequest(run=run, tasks=[task]))
    held = await replay.LeaseTasks(pb.LeaseTasksRequest(run=run, worker="w", max_tasks=1))
    group = make_group(task)
    experts = column_to_proto(
        "routed_experts", Along.TOKENS, np.arange(20, dtype="u1").reshape(5, 2, 2)
    )
    for trajectory in group.trajectories:
        trajectory.sequences[0].columns.append(experts)
    outcome = await append(replay, run, pb_stage("UNSCORED"), group, held.leases[0].lease_id)
    assert outcome.status == pb.APPEND_STATUS_APPENDED
    leased = await replay.LeaseGroups(
        pb.LeaseGroupsRequest(run=run, stage=pb_stage("UNSCORED"), worker="w", max_groups=1)
    )
    for trajectory in leased.leases[0].group.trajectories:
        assert trajectory.sequences[0].columns[-1] == experts
    await replay.Purge(pb.PurgeRequest(run=run, confirm=run))


async def test_a_rejected_group_comes_back_with_its_reason_and_words(
    replay: ReplayServiceStub, run: str
) -> None:
    group = make_group(make_task("a"))
    outcome = await append(replay, run, pb_stage("UNSCORED"), group, "task/1/a")
    assert (outcome.status, outcome.reason) == (pb.APPEND_STATUS_REJECTED, "UNKNOWN_TASK")
    assert outcome.message
    set_values(group.trajectories[0].sequences[0], "token_ids", [100, 8, 2, 11, 12])
    outcome = await append(replay, run, pb_stage("UNSCORED"), group, "task/1/a")
    assert outcome.reason == "TOKEN_OUT_OF_RANGE"


async def test_errors_carry_their_status_and_reason(replay: ReplayServiceStub, run: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as bad_run:
        await replay.GetStats(pb.GetStatsRequest(run="a b"))
    with pytest.raises(grpc.aio.AioRpcError) as unconfirmed:
        await replay.Purge(pb.PurgeRequest(run=run, confirm="no"))
    with pytest.raises(grpc.aio.AioRpcError) as moved:
        await replay.OfferTasks(pb.OfferTasksRequest(run=run, expected_cursor="5", next_cursor="6"))
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await replay.Requeue(pb.RequeueRequest(run=run, group_ids=["a"]))
    refusals = [(e.value.code().name, reason_of(e.value)) for e in (bad_run, unconfirmed, moved)]
    assert refusals == [
        ("INVALID_ARGUMENT", "BAD_RUN"),
        ("FAILED_PRECONDITION", "CONFIRM_RUN"),
        ("ABORTED", "CURSOR_MOVED"),
    ]
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_sends_a_snapshot_and_then_changes(
    replay: ReplayServiceStub, run: str
) -> None:
    watch = replay.Watch(pb.WatchRequest(run=run, interval_s=0.02))
    async with asyncio.timeout(PATIENCE_S):
        assert (await watch.read()).stats.training.num_tasks_offered == 0
        await replay.OfferTasks(pb.OfferTasksRequest(run=run, tasks=[make_task("a")]))
        assert (await watch.read()).stats.training.num_tasks_offered == 1
    watch.cancel()


async def test_a_lease_waits_for_what_another_call_appends(
    replay: ReplayServiceStub, run: str
) -> None:
    waiting = asyncio.ensure_future(
        replay.LeaseTasks(pb.LeaseTasksRequest(run=run, worker="c", max_tasks=1, wait_s=20))
    )
    await asyncio.sleep(0.05)
    task = make_task("e", purpose=2)  # type: ignore[arg-type]
    await replay.OfferTasks(pb.OfferTasksRequest(run=run, tasks=[task]))
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting).leases[0].task == task


def start_service(**settings: str) -> subprocess.Popen[str]:
    variables = {f"DIALOOP_REPLAY_{name.upper()}": value for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "dialoop_services.replay"],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_redis_the_service_says_so_in_one_sentence_and_exits_2(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    process = start_service(redis_url=url)
    _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert complaint.count("\n") == 1
    assert f"Redis does not answer at {url}" in complaint


def test_a_password_stays_out_of_the_complaint() -> None:
    process = start_service(redis_url="redis://:geheim@127.0.0.1:1/0")
    _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "geheim" not in complaint


def test_the_process_serves_and_ends_at_once_though_somebody_waits() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start_service(store="memory", port=str(port))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
        stub = ReplayServiceStub(channel)
        waiting = stub.LeaseTasks.future(
            pb.LeaseTasksRequest(run="r", worker="c", max_tasks=1, wait_s=60)
        )
        stub.GetStats(pb.GetStatsRequest(run="r"))
        process.terminate()
        assert waiting.result(timeout=30).empty_reason == pb.EMPTY_REASON_NO_TASKS
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
