"""Waiting, watching, requests and leases: what lies between the wire and the store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.trajectory import Purpose
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import Kind, LeaseName, QueueLimits, parse_lease

from tests.support.queue_model.store import ModelStore
from tests.support.samples.replay_samples import (
    announce,
    make_group,
    make_task,
    offer,
    set_values,
    stats_of,
)
from tests.support.waiting import PATIENCE_S

RUN = "run"
CONTEXT: Any = None


@pytest.fixture
def queue() -> ReplayServicer:
    # Polling is out of the way: who wakes in time was woken.
    return ReplayServicer(ModelStore(QueueLimits()), poll_s=100.0)


async def lease(queue: ReplayServicer, wait_s: float, num: int = 1) -> pb.LeaseTasksResponse:
    request = pb.LeaseTasksRequest(run=RUN, worker="c", max_tasks=num, lease_s=60, wait_s=wait_s)
    return await queue.LeaseTasks(request, CONTEXT)


async def offer_to(queue: ReplayServicer, task: trajectory_pb2.Task) -> None:
    await queue.OfferTasks(pb.OfferTasksRequest(run=RUN, tasks=[task]), CONTEXT)


async def test_a_waiting_task_lease_wakes_at_the_offer(queue: ReplayServicer) -> None:
    waiting = asyncio.create_task(lease(queue, 30))
    await asyncio.sleep(0.01)
    await offer_to(queue, make_task("e", purpose=Purpose.EVALUATION))
    assert len((await waiting).leases) == 1


async def test_a_waiting_collector_wakes_when_a_credit_comes_free(queue: ReplayServicer) -> None:
    await offer_to(queue, make_task("a"))
    waiting = asyncio.create_task(lease(queue, 30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    version = trajectory_pb2.PolicyVersion(lineage="main", number=0)
    request = pb.AdvancePolicyRequest(run=RUN, policy_version=version, max_outstanding_groups=1)
    await queue.AdvancePolicy(request, CONTEXT)
    assert len((await waiting).leases) == 1


async def test_waiting_ends_with_the_reason(queue: ReplayServicer) -> None:
    started = time.monotonic()
    answer = await lease(queue, 0.05)
    assert answer.empty_reason == pb.EMPTY_REASON_NO_TASKS
    assert 0.04 < time.monotonic() - started < PATIENCE_S


async def test_stopping_answers_those_who_wait(queue: ReplayServicer) -> None:
    query = pb.LeaseGroupsRequest(run=RUN, stage=2, worker="t", max_groups=1, wait_s=60)  # type: ignore[arg-type]
    waiting = asyncio.create_task(queue.LeaseGroups(query, CONTEXT))
    watching = asyncio.create_task(anext(watch_changes(queue)))
    await asyncio.sleep(0.01)
    queue.stop_waiting()
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting).empty_reason == pb.EMPTY_REASON_NO_GROUPS
        with pytest.raises(StopAsyncIteration):
            await watching


def watch_of(queue: ReplayServicer) -> AsyncIterator[pb.WatchResponse]:
    return queue.Watch(pb.WatchRequest(run=RUN, interval_s=0.01), CONTEXT)


async def watch_changes(queue: ReplayServicer) -> AsyncIterator[pb.WatchResponse]:
    """What a watch gives after its first snapshot."""
    watch = watch_of(queue)
    await anext(watch)
    async for answer in watch:
        yield answer


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_changes(
    queue: ReplayServicer,
) -> None:
    watch = watch_of(queue)
    first = await anext(watch)
    following = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not following.done()
    await offer_to(queue, make_task("a"))
    async with asyncio.timeout(PATIENCE_S):
        second = await following
    assert first.stats.training.num_tasks_offered == 0
    assert second.stats.training.num_tasks_offered == 1


async def test_valid_and_invalid_groups_of_one_call_are_judged_one_by_one(
    queue: ReplayServicer,
) -> None:
    await offer(queue.store, RUN, "a", "b")
    await announce(queue.store, RUN)
    leases = (await lease(queue, 0, 2)).leases
    items = [pb.AppendItem(group=make_group(x.task), lease_id=x.lease_id) for x in leases]
    set_values(items[0].group.trajectories[0].sequences[0], "inference_logprobs", [])
    request = pb.AppendGroupsRequest(run=RUN, stage=1, items=items)  # type: ignore[arg-type]
    outcomes = (await queue.AppendGroups(request, CONTEXT)).outcomes
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [
        (pb.APPEND_STATUS_REJECTED, "RAGGED"),
        (pb.APPEND_STATUS_APPENDED, ""),
    ]
    assert "a.0" in outcomes[0].message
    assert (await stats_of(queue.store, RUN)).num_rejected_appends == 1


async def test_a_run_is_deleted_only_by_its_repeated_name(queue: ReplayServicer) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        await queue.Purge(pb.PurgeRequest(run=RUN), CONTEXT)
    assert caught.value.reason == "CONFIRM_RUN"
    await queue.Purge(pb.PurgeRequest(run=RUN, confirm=RUN), CONTEXT)


@pytest.mark.parametrize("run", ["", ".hidden", "a b", "a{b}", "a:b", "x" * 129])
async def test_a_run_that_could_not_be_a_key_is_refused(queue: ReplayServicer, run: str) -> None:
    """Every rpc refuses it: no store sees such a name."""
    names = [name for name in vars(ReplayServicer) if name[0].isupper()]
    assert len(names) == 19
    for name in names:
        answer = getattr(queue, name)(request_of(name, run), CONTEXT)
        with pytest.raises(InvalidInput) as caught:
            await (anext(answer) if name == "Watch" else answer)
        assert caught.value.reason == "BAD_RUN", name


def request_of(name: str, run: str) -> Any:
    """A request that is good but for its run."""
    request = getattr(pb, f"{name}Request")(run=run)
    good = {"stage": 1, "worker": "w", "max_tasks": 1, "max_groups": 1, "interval_s": 1.0}
    for field in request.DESCRIPTOR.fields:
        if field.name in good:
            setattr(request, field.name, good[field.name])
        if field.name == "policy_version":
            request.policy_version.lineage = "main"
    return request


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
async def test_a_senseless_query_is_refused(
    queue: ReplayServicer, request_: pb.LeaseGroupsRequest
) -> None:
    request_.run = RUN
    with pytest.raises(InvalidInput):
        await queue.LeaseGroups(request_, CONTEXT)


@pytest.mark.parametrize(
    "item",
    [
        pb.AcknowledgeItem(lease_id="x", outcome=2),  # type: ignore[arg-type]
        pb.AcknowledgeItem(lease_id="x"),
        pb.ReturnItem(lease_id="x", reason="Not snake"),
        pb.ReturnItem(lease_id="scored/1/a", reason="broken", num_trajectories=1),
        pb.ReturnItem(lease_id="task/1/a", reason="broken", set_aside=True),
    ],
)
async def test_a_drop_and_a_return_need_a_reason_and_fit_their_lease(
    queue: ReplayServicer, item: pb.AcknowledgeItem | pb.ReturnItem
) -> None:
    if isinstance(item, pb.ReturnItem):
        answer = queue.Return(pb.ReturnRequest(run=RUN, items=[item]), CONTEXT)
    else:
        answer = queue.Acknowledge(pb.AcknowledgeRequest(run=RUN, items=[item]), CONTEXT)
    with pytest.raises(InvalidInput):
        await answer


def test_a_lease_id_says_what_it_holds() -> None:
    lease_id = "scored/17/arithmetic/train/3"
    assert parse_lease(lease_id) == LeaseName(kind=Kind.SCORED, task_id="arithmetic/train/3")
    assert parse_lease("other/1/a") is None
    assert parse_lease("task/x/a") is None


def test_replay_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, dialoop_services.replay.__main__; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
