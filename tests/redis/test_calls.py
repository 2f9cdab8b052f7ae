"""What the queue asks of Redis: few calls, few writes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import FrameType

import pytest
import pytest_asyncio
import redis
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import RedisServer, new_run, own_redis  # noqa: F401
from tests.support.samples.replay_samples import (
    announce,
    append,
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


async def test_a_call_is_sent_once_also_the_first_of_its_kind(
    store: RedisStore, own_redis: RedisServer
) -> None:
    """Redis did not know the script, and got all 64 MiB again."""
    with redis.Redis.from_url(own_redis.url) as client:
        client.script_flush()
    await store.check()
    calls_of(own_redis)
    await announce(store, new_run())
    calls = calls_of(own_redis)
    assert calls["evalsha"] == 1
    assert not [name for name in calls if name.startswith("script")]


async def test_what_redis_refuses_does_not_stay_until_python_looks_for_circles(
    store: RedisStore, own_redis: RedisServer
) -> None:
    run = new_run()
    with redis.Redis.from_url(own_redis.url) as client:
        client.set(f"dialoop:{{{run}}}:counts", "no hash")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
            await store.count_rejected(run, 1)
        frames = [each for each in gc.get_objects() if type(each) is FrameType]
        held = [f.f_locals for f in frames if "/redis/" in f.f_code.co_filename]
        assert not [names for names in held if "args" in names]  # what was sent
    finally:
        gc.enable()


async def test_a_burst_of_calls_opens_few_connections(
    store: RedisStore, own_redis: RedisServer
) -> None:
    """All who wait for a change of a run look again at the same moment."""
    request = pb.GetStatsRequest(run=new_run())
    await asyncio.gather(*(store.apply(request, pb.GetStatsResponse) for _ in range(300)))
    with redis.Redis.from_url(own_redis.url) as client:
        assert len(client.client_list()) - 1 <= 32


async def test_a_call_that_was_given_up_leaves_no_answer_for_the_next(store: RedisStore) -> None:
    run = new_run()
    leases = await lease_all(store, run)
    for _ in range(20):
        given_up = asyncio.create_task(lease_tasks(store, run))
        await asyncio.sleep(0.0005)
        given_up.cancel()
        stats = await store.apply(pb.GetStatsRequest(run=run), pb.GetStatsResponse)
        assert stats.stats.training.num_groups_leased == len(leases)
