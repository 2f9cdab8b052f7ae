"""What the queue asks of Redis: few calls, few writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import redis
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore, ShrinkingPool
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import RedisServer, new_run, own_redis  # noqa: F401
from tests.support.samples.replay_samples import (
    announce,
    append,
    append_member,
    bare_group,
    lease_tasks,
    make_task,
    offer_tasks,
)

pytestmark = pytest.mark.redis
NUM_GROUPS = 6


@pytest_asyncio.fixture
async def store(own_redis: RedisServer) -> AsyncIterator[RedisStore]:
    made = RedisStore(own_redis.url, QueueLimits(lease_s=60))
    yield made
    await made.close()


def calls_of(server: RedisServer) -> dict[str, int]:
    """Return how often each command ran since the last look."""
    with redis.Redis.from_url(server.url) as client:
        stats = client.info("commandstats")
        client.config_resetstat()
    return {name.removeprefix("cmdstat_"): values["calls"] for name, values in stats.items()}


async def lease_all(store: RedisStore, run: str) -> list[pb.TaskLease]:
    await announce(store, run)
    tasks = [make_task(f"t{i}", num_trajectories=2) for i in range(NUM_GROUPS)]
    await offer_tasks(store, run, tasks)
    return list((await lease_tasks(store, run, NUM_GROUPS)).leases)


async def test_appends_that_wait_go_to_redis_in_one_call(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    """Two calls are under way at most; each concurrent append was a call of its own."""
    run = new_run()
    leases = await lease_all(store, run)
    await append_member(store, run, leases[0].lease_id, 0)  # loads the script
    calls_of(own_redis)
    wanted = [(lease.lease_id, member) for lease in leases[1:] for member in (0, 1, 1)]
    outcomes = await asyncio.gather(*(append_member(store, run, *item) for item in wanted))
    appended, duplicate = pb.APPEND_STATUS_APPENDED, pb.APPEND_STATUS_DUPLICATE
    assert [o.status for o in outcomes] == [appended, appended, duplicate] * (NUM_GROUPS - 1)
    assert calls_of(own_redis)["evalsha"] <= 3


async def test_appends_are_packed_while_redis_applies_others(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service waited for Redis, and Redis for the service."""
    run = new_run()
    leases = await lease_all(store, run)
    sizes, may_go = list[int](), asyncio.Event()
    append_batch = store._append_batch

    async def record(run: str, batch: Sequence[Any]) -> None:
        sizes.append(len(batch))
        await may_go.wait()
        await append_batch(run, batch)

    monkeypatch.setattr(store, "_append_batch", record)
    appends = []
    for lease in leases:
        appends.append(asyncio.create_task(append_member(store, run, lease.lease_id, 0)))
        await asyncio.sleep(0.01)
    assert sizes == [1, 1]
    may_go.set()
    outcomes = await asyncio.gather(*appends)
    assert {outcome.status for outcome in outcomes} == {pb.APPEND_STATUS_APPENDED}
    assert sizes == [1, 1, NUM_GROUPS - 2]
    assert (store._appends, store._appending) == ({}, {})


async def test_a_whole_group_is_written_once(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    """Its record was written per member, and the members beside the group."""
    run = new_run()
    leases = await lease_all(store, run)
    await append(store, run, Stage.UNSCORED, bare_group("t0", leases[0].lease_id, size=2))
    calls_of(own_redis)
    items = [bare_group(lease.task.task_id, lease.lease_id, size=2) for lease in leases[1:]]
    await append(store, run, Stage.UNSCORED, *items)
    calls = calls_of(own_redis)
    # One for all records, and one for the number of the last entry.
    assert (calls["hset"], calls["xadd"]) == (2, NUM_GROUPS - 1)


async def test_connections_that_only_a_burst_needed_are_closed(
    store: RedisStore, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShrinkingPool, "IDLE_S", 0.3)
    request = pb.GetStatsRequest(run=new_run())

    def num_clients() -> int:
        with redis.Redis.from_url(own_redis.url) as client:
            return len(client.client_list()) - 1

    await asyncio.gather(*(store.apply(request, pb.GetStatsResponse) for _ in range(20)))
    assert num_clients() > 5
    for _ in range(5):
        await asyncio.sleep(0.1)
        await store.apply(request, pb.GetStatsResponse)
    assert num_clients() == 1
    await asyncio.gather(*(store.apply(request, pb.GetStatsResponse) for _ in range(20)))


async def test_more_calls_at_once_than_redis_py_has_connections_by_default(
    store: RedisStore,
) -> None:
    """All who wait for a change of a run look again at the same moment."""
    request = pb.GetStatsRequest(run=new_run())
    await asyncio.gather(*(store.apply(request, pb.GetStatsResponse) for _ in range(150)))


async def test_a_call_that_was_given_up_leaves_no_answer_for_the_next(store: RedisStore) -> None:
    run = new_run()
    leases = await lease_all(store, run)
    for _ in range(20):
        given_up = asyncio.create_task(lease_tasks(store, run))
        await asyncio.sleep(0.0005)
        given_up.cancel()
        stats = await store.apply(pb.GetStatsRequest(run=run), pb.GetStatsResponse)
        assert stats.stats.training.num_groups_leased == len(leases)
