"""Both stores of the queue, a run in one of them, and the moves the facts are told with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest
import pytest_asyncio
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.config.tables import Overflow
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits, QueueStore

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append,
    assert_adds_up,
    bare_group,
    lease_tasks,
    offer,
    play,
    purge,
    stage_name,
    stats_of,
)

MAX_DEAD_LETTERS = 4
MAX_FINISHED = 20
# Of groups whose names have one letter: how many one call may hand out.
NUM_THAT_FIT = 6
LIMITS = QueueLimits(
    max_attempts=3,
    max_deliveries=3,
    max_dead_letters=MAX_DEAD_LETTERS,
    lease_s=60,
    max_finished=MAX_FINISHED,
    max_lease_bytes=NUM_THAT_FIT * bare_group("a", "").group.ByteSize(),
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[QueueStore]:
    if request.param == "memory":
        yield ModelStore(LIMITS, clock=clock)
        return
    made = RedisStore(request.getfixturevalue("redis_url"), LIMITS, clock=clock)
    yield made
    await made.close()


def set_overflow(store: QueueStore, overflow: Overflow, *, most: int) -> None:
    """Bound how many groups may wait, and say what happens to one more."""
    assert isinstance(store, ModelStore | RedisStore)
    store.limits = replace(store.limits, max_waiting_groups=most, overflow=overflow)


@pytest_asyncio.fixture
async def run(request: pytest.FixtureRequest, store: QueueStore) -> AsyncIterator[str]:
    name = new_run()
    yield name
    size = getattr(request.module, "GROUP_SIZE", 2)
    assert_adds_up(await stats_of(store, name), size=size)
    await purge(store, name)


async def lease_task(store: QueueStore, run: str) -> pb.TaskLease:
    (lease,) = (await lease_tasks(store, run)).leases
    return lease


async def lease(
    store: QueueStore,
    run: str,
    stage: Stage,
    *,
    num: int = 1,
    least: int = 1,
    max_staleness: int | None = None,
    prefix: str = "",
    worker: str = "w",
    lease_s: float = 60,
    selection: pb.Selection = pb.SELECTION_FIFO,
) -> pb.LeaseGroupsResponse:
    request = pb.LeaseGroupsRequest(
        run=run,
        stage=stage_name(stage),
        worker=worker,
        max_groups=num,
        min_groups=least,
        lease_s=lease_s,
        max_staleness=max_staleness,
        task_id_prefix=prefix,
        selection=selection,
    )
    return await store.apply(request, pb.LeaseGroupsResponse)


def names_of(leases: Iterable[pb.GroupLease]) -> list[str]:
    return [lease.group.group_id for lease in leases]


async def ack(store: QueueStore, run: str, lease_id: str, drop_reason: str = "") -> str:
    """Acknowledge a group as consumed, or as dropped for a reason; why it was not acknowledged."""
    outcome = pb.OUTCOME_DROPPED if drop_reason else pb.OUTCOME_CONSUMED
    item = pb.AcknowledgeItem(lease_id=lease_id, outcome=outcome, reason=drop_reason)
    request = pb.AcknowledgeRequest(run=run, items=[item])
    (answer,) = (await store.apply(request, pb.AcknowledgeResponse)).outcomes
    assert answer.lease_id == lease_id
    assert answer.acknowledged is not bool(answer.reason)
    return answer.reason


async def return_(
    store: QueueStore,
    run: str,
    lease_id: str,
    *,
    failed: bool = False,
    played: int = 0,
    set_aside: bool = False,
    members: Iterable[int] = (),
) -> tuple[int, int]:
    item = pb.ReturnItem(
        lease_id=lease_id,
        reason="broken",
        num_trajectories=played,
        failed=failed,
        set_aside=set_aside,
        failed_members=members,
    )
    answer = await store.apply(pb.ReturnRequest(run=run, items=[item]), pb.ReturnResponse)
    return answer.num_returned, answer.num_dropped


async def extend(store: QueueStore, run: str, *lease_ids: str) -> list[str]:
    """Extend leases by a minute; those that are lost."""
    request = pb.ExtendRequest(run=run, lease_ids=lease_ids, lease_s=60)
    return list((await store.apply(request, pb.ExtendResponse)).lost_lease_ids)


async def list_leases(store: QueueStore, run: str, stage: Stage, worker: str = "w") -> list[str]:
    request = pb.ListLeasesRequest(run=run, stage=stage_name(stage), worker=worker)
    return list((await store.apply(request, pb.ListLeasesResponse)).lease_ids)


async def reopen(store: QueueStore, run: str, *lease_ids: str) -> pb.ReopenLeasesResponse:
    request = pb.ReopenLeasesRequest(run=run, lease_ids=lease_ids, lease_s=60)
    return await store.apply(request, pb.ReopenLeasesResponse)


async def peek(store: QueueStore, run: str, stage: Stage, num: int) -> list[str]:
    request = pb.PeekRequest(run=run, stage=stage_name(stage), max_groups=num)
    groups = (await store.apply(request, pb.PeekResponse)).groups
    return [group.group_id for group in groups]


async def dead_letters(store: QueueStore, run: str, num: int) -> list[pb.DeadLetter]:
    request = pb.ListDeadLettersRequest(run=run, max_groups=num)
    return list((await store.apply(request, pb.ListDeadLettersResponse)).dead_letters)


async def requeue(store: QueueStore, run: str, *group_ids: str) -> int:
    request = pb.RequeueRequest(run=run, group_ids=group_ids)
    return (await store.apply(request, pb.RequeueResponse)).num_requeued


async def score(store: QueueStore, run: str, *, acknowledge: bool = True) -> str:
    """Score the oldest unscored group; its unscored lease."""
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    item = pb.AppendItem(group=held.group, lease_id=held.lease_id)
    (outcome,) = await append(store, run, Stage.SCORED, item)
    assert outcome.status == pb.APPEND_STATUS_APPENDED, outcome
    if acknowledge:
        assert await ack(store, run, held.lease_id) == ""
    return held.lease_id


async def ready_to_train(store: QueueStore, run: str, *task_ids: str) -> None:
    await announce(store, run)
    await offer(store, run, *task_ids)
    for _ in task_ids:
        await play(store, run)
        await score(store, run)
