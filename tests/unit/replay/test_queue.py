"""Waiting, watching, requests and leases: what lies between the wire and the store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay import requests
from dialoop_services.replay.leases import Kind, LeaseName, format_lease, parse_lease
from dialoop_services.replay.memory_store.store import MemoryStore
from dialoop_services.replay.queue import ReplayQueue
from dialoop_services.replay.store import (
    AppendStatus,
    EmptyReason,
    GroupQuery,
    Limits,
    State,
    TaskLeases,
)

from tests.support.patience import PATIENCE_S
from tests.support.samples.replay_samples import (
    announce,
    bare_task,
    make_group,
    make_task,
    offered,
    submission,
)

RUN = "run"


@pytest.fixture
def queue() -> ReplayQueue:
    # Polling is out of the way: who wakes in time was woken.
    return ReplayQueue(MemoryStore(Limits()), poll_s=100.0)


async def lease(queue: ReplayQueue, wait_s: float) -> TaskLeases:
    return await queue.lease_tasks(RUN, worker="c", max_tasks=1, lease_s=60, wait_s=wait_s)


async def test_a_waiting_task_lease_wakes_at_the_offer(queue: ReplayQueue) -> None:
    waiting = asyncio.create_task(lease(queue, 30))
    await asyncio.sleep(0.01)
    await queue.offer_tasks(RUN, [bare_task("e", purpose=Purpose.EVALUATION)], None)
    assert len((await waiting).leases) == 1


async def test_a_waiting_collector_wakes_when_a_credit_comes_free(queue: ReplayQueue) -> None:
    await queue.offer_tasks(RUN, [bare_task("a")], None)
    waiting = asyncio.create_task(lease(queue, 30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    version = PolicyVersion(lineage="main", number=0)
    await queue.advance_policy(RUN, version, trained_lease_ids=(), max_outstanding_groups=1)
    assert len((await waiting).leases) == 1


async def test_waiting_ends_with_the_reason(queue: ReplayQueue) -> None:
    started = time.monotonic()
    found = await lease(queue, 0.05)
    assert found.empty_reason is EmptyReason.NO_TASKS
    assert 0.04 < time.monotonic() - started < PATIENCE_S


async def test_stopping_answers_those_who_wait(queue: ReplayQueue) -> None:
    query = GroupQuery(stage=Stage.SCORED, worker="t", max_groups=1, lease_s=60)
    waiting = asyncio.create_task(queue.lease_groups(RUN, query, wait_s=60))
    watching = asyncio.create_task(anext(drained(queue)))
    await asyncio.sleep(0.01)
    queue.stop_waiting()
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting).empty_reason is EmptyReason.NO_GROUPS
        with pytest.raises(StopAsyncIteration):
            await watching


async def drained(queue: ReplayQueue):  # type: ignore[no-untyped-def]
    """What a watch gives after its first snapshot."""
    watch = queue.watch(RUN, 0.01)
    await anext(watch)
    async for stats in watch:
        yield stats


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_changes(queue: ReplayQueue) -> None:
    watch = queue.watch(RUN, 0.01)
    first = await anext(watch)
    following = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not following.done()
    await queue.offer_tasks(RUN, [bare_task("a")], None)
    async with asyncio.timeout(PATIENCE_S):
        second = await following
    assert first.training.groups[State.OFFERED] == 0
    assert second.training.groups[State.OFFERED] == 1


async def test_valid_and_invalid_groups_of_one_call_are_judged_one_by_one(
    queue: ReplayQueue,
) -> None:
    tasks = [make_task("a"), make_task("b")]
    await queue.offer_tasks(RUN, [offered(task) for task in tasks], None)
    await announce(queue.store, RUN)
    leases = await queue.lease_tasks(RUN, worker="c", max_tasks=2, lease_s=60, wait_s=0)
    bad, good = make_group(tasks[0]), make_group(tasks[1])
    del bad.trajectories[0].sequences[0].inference_logprobs[:]
    verdicts = await queue.append_groups(
        RUN,
        Stage.UNSCORED,
        [
            submission(group, held.lease_id)
            for group, held in zip((bad, good), leases.leases, strict=True)
        ],
    )
    assert [(v.status, v.reason) for v in verdicts] == [
        (AppendStatus.REJECTED, "RAGGED"),
        (AppendStatus.APPENDED, ""),
    ]
    assert "a#1.0" in verdicts[0].message
    assert (await queue.store.stats(RUN)).num_rejected_appends == 1


async def test_a_run_is_deleted_only_by_its_repeated_name(queue: ReplayQueue) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        await queue.purge(RUN, "")
    assert caught.value.reason == "CONFIRM_RUN"
    await queue.purge(RUN, RUN)


@pytest.mark.parametrize("run", ["", ".hidden", "a b", "a{b}", "a:b", "x" * 129])
def test_a_run_that_could_not_be_a_key_is_refused(run: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        requests.run_of(run)
    assert caught.value.reason == "BAD_RUN"


@pytest.mark.parametrize(
    "request_",
    [
        pb.LeaseGroupsRequest(stage=1, worker="w"),
        pb.LeaseGroupsRequest(stage=0, worker="w", max_groups=1),
        pb.LeaseGroupsRequest(stage=1, max_groups=1),
        pb.LeaseGroupsRequest(stage=1, worker="w", max_groups=1, min_groups=2),
        pb.LeaseGroupsRequest(stage=1, worker="w", max_groups=1, lease_s=-1),
        pb.LeaseGroupsRequest(stage=1, worker="w", max_groups=1, lease_s=float("nan")),
        pb.LeaseGroupsRequest(stage=1, worker="w", max_groups=1, max_staleness=1),
        pb.LeaseGroupsRequest(stage=2, worker="w", max_groups=1, task_id_prefix="e"),
    ],
)
def test_a_senseless_query_is_refused(request_: pb.LeaseGroupsRequest) -> None:
    with pytest.raises(InvalidInput):
        requests.query_of(request_, default_lease_s=60, max_bytes=1 << 20)


def test_a_drop_and_a_return_need_a_reason() -> None:
    with pytest.raises(InvalidInput):
        requests.acknowledgement_of(pb.AcknowledgeItem(lease_id="x", outcome=2))
    with pytest.raises(InvalidInput):
        requests.acknowledgement_of(pb.AcknowledgeItem(lease_id="x"))
    with pytest.raises(InvalidInput):
        requests.given_back_of(pb.ReturnItem(lease_id="x", reason="Not snake"))
    with pytest.raises(InvalidInput):
        requests.given_back_of(
            pb.ReturnItem(lease_id="scored/1/a", reason="broken", num_trajectories=1)
        )


def test_a_lease_id_says_what_it_holds() -> None:
    lease_id = format_lease(Kind.SCORED, 17, "arithmetic/train/3")
    assert parse_lease(lease_id) == LeaseName(kind=Kind.SCORED, task_id="arithmetic/train/3")
    assert parse_lease("other/1/a") is None
    assert parse_lease("task/x/a") is None


def test_replay_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, dialoop_services.replay.__main__; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
