"""Both stores of the queue, a run in one of them, and the moves the facts are told with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from dialoop.trajectory import Purpose, Stage
from dialoop_services.replay.memory_store.store import MemoryStore
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import (
    Acknowledgement,
    AppendStatus,
    GivenBack,
    GroupLeases,
    GroupQuery,
    Limits,
    Outcome,
    Store,
    TaskLease,
)

from tests.support.redis_server import new_run
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    assert_adds_up,
    bare_group,
    bare_task,
    play,
)

LIMITS = Limits(max_attempts=3, max_deliveries=3, max_dead_letters=4, lease_s=60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(LIMITS, clock=clock)
        return
    made = RedisStore(request.getfixturevalue("redis_url"), LIMITS, clock=clock)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def run(store: Store) -> AsyncIterator[str]:
    name = new_run()
    yield name
    assert_adds_up(await store.stats(name))
    await store.purge(name)


async def offer(store: Store, run: str, *task_ids: str, purpose: Purpose = Purpose.TRAINING) -> int:
    tasks = [bare_task(task_id, purpose=purpose) for task_id in task_ids]
    return (await store.offer_tasks(run, tasks, None)).num_new


async def lease_task(store: Store, run: str) -> TaskLease:
    (lease,) = (await store.lease_tasks(run, worker="c", max_tasks=1, lease_s=60)).leases
    return lease


async def lease(
    store: Store,
    run: str,
    stage: Stage,
    *,
    num: int = 1,
    least: int = 1,
    max_staleness: int | None = None,
    prefix: str = "",
    worker: str = "w",
) -> GroupLeases:
    query = GroupQuery(
        stage=stage,
        worker=worker,
        max_groups=num,
        min_groups=least,
        lease_s=60,
        max_staleness=max_staleness,
        task_id_prefix=prefix,
    )
    return await store.lease_groups(run, query)


async def ack(
    store: Store, run: str, lease_id: str, outcome: Outcome = Outcome.CONSUMED, reason: str = ""
) -> str:
    item = Acknowledgement(lease_id=lease_id, outcome=outcome, reason=reason)
    (why_not,) = await store.acknowledge(run, [item])
    return why_not


async def return_(
    store: Store,
    run: str,
    lease_id: str,
    *,
    failed: bool = False,
    played: int = 0,
    set_aside: bool = False,
) -> tuple[int, int]:
    item = GivenBack(
        lease_id=lease_id,
        reason="broken",
        num_trajectories=played,
        failed=failed,
        set_aside=set_aside,
    )
    returned = await store.give_back(run, [item])
    return returned.num_returned, returned.num_dropped


async def score(store: Store, run: str, *, acknowledge: bool = True) -> str:
    """Score the oldest unscored group; its unscored lease."""
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    task_id = held.lease_id.split("/", 2)[2]
    attempt = int(held.payload[:-2].decode().rpartition("#")[2])
    group = bare_group(task_id, held.lease_id, attempt=attempt)
    (result,) = await store.append_groups(run, Stage.SCORED, [group])
    assert result.status is AppendStatus.APPENDED, result
    if acknowledge:
        assert await ack(store, run, held.lease_id) == ""
    return held.lease_id


async def ready_to_train(store: Store, run: str, *task_ids: str) -> None:
    await announce(store, run)
    await offer(store, run, *task_ids)
    for _ in task_ids:
        await play(store, run)
        await score(store, run)
