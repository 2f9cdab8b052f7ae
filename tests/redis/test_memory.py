"""A Redis with little memory: it refuses new work, and what frees memory goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from dialoop.errors import CapacityExhausted, InvalidConfig
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import RedisServer, own_redis  # noqa: F401
from tests.support.replay_store_world import (
    ack,
    extend,
    lease,
    lease_task,
    reopen,
    requeue,
    return_,
    score,
)
from tests.support.samples.replay_samples import (
    announce,
    append_member,
    assert_adds_up,
    lease_tasks,
    offer,
    play,
    stats_of,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.redis
RUN = "run"
CONTENT = "x" * 20_000


@contextlib.contextmanager
def redis_of(directory: Path, **settings: str) -> Iterator[RedisServer]:
    server = RedisServer(directory, fsync="no", **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def fill_to(server: RedisServer, share: float) -> None:
    """Set maxmemory so that what is there is this share of it."""
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / share))


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "allkeys-lfu"])
async def test_a_redis_that_would_delete_the_ledger_is_refused(tmp_path: Path, policy: str) -> None:
    with redis_of(tmp_path, **{"maxmemory-policy": policy}) as server:
        store = RedisStore(server.url, QueueLimits(), timeout_s=PATIENCE_S)
        with pytest.raises(InvalidConfig) as caught:
            await store.check()
        await store.close()
    assert caught.value.reason == "REDIS_EVICTS"
    assert policy in caught.value.message
    assert "noeviction" in caught.value.remedy


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru"])
async def test_a_redis_that_deletes_nothing_of_ours_is_taken(tmp_path: Path, policy: str) -> None:
    with redis_of(tmp_path, **{"maxmemory-policy": policy}) as server:
        store = RedisStore(server.url, QueueLimits(), timeout_s=PATIENCE_S)
        await store.check()
        await store.close()


async def test_a_full_redis_refuses_offers_and_appends_and_drains(tmp_path: Path) -> None:
    with redis_of(tmp_path) as server:
        store = RedisStore(server.url, QueueLimits(lease_s=600), timeout_s=PATIENCE_S)
        await announce(store, RUN, credits=1000)
        await offer(store, RUN, *(f"t{i}" for i in range(300)))
        num_appended = 100
        for _ in range(num_appended):
            held = await lease_task(store, RUN)
            for member in range(2):
                outcome = await append_member(store, RUN, held.lease_id, member, content=CONTENT)
                assert outcome.status == pb.APPEND_STATUS_APPENDED
        fill_to(server, 0.9)
        held = await lease_task(store, RUN)
        for refused_call in (
            append_member(store, RUN, held.lease_id, 0, content=CONTENT),
            offer(store, RUN, "more"),
        ):
            with pytest.raises(CapacityExhausted) as caught:
                await refused_call
            assert (caught.value.reason, bool(caught.value.remedy)) == ("STORE_FULL", True)
        # What drains it is not refused: leases, scores, acknowledgements, returns, announcements.
        assert (await lease_tasks(store, RUN)).leases
        for _ in range(num_appended // 2):
            await score(store, RUN)
            (scored,) = (await lease(store, RUN, Stage.SCORED)).leases
            await announce(store, RUN, 0, scored.lease_id, credits=1000)
            assert await ack(store, RUN, scored.lease_id) == ""
        outcome = await append_member(store, RUN, held.lease_id, 0, content=CONTENT)
        assert outcome.status == pb.APPEND_STATUS_APPENDED, "there is room again"
        await offer(store, RUN, "more")
        stats = await stats_of(store, RUN)
        assert stats.training.num_groups_consumed == num_appended // 2
        assert_adds_up(stats, size=None)
        await store.close()


async def test_what_frees_memory_works_above_maxmemory(tmp_path: Path) -> None:
    with redis_of(tmp_path) as server:
        store = RedisStore(server.url, QueueLimits(lease_s=600), timeout_s=PATIENCE_S)
        await announce(store, RUN, credits=1000)
        await offer(store, RUN, *(f"t{i}" for i in range(8)))
        for _ in range(5):
            await play(store, RUN)
            await score(store, RUN)
        held = [(await lease(store, RUN, Stage.SCORED)).leases[0].lease_id for _ in range(4)]
        played, returned = await lease_task(store, RUN), await lease_task(store, RUN)
        fill_to(server, 1.5)
        assert not (await stats_of(store, RUN)).training.num_groups_consumed
        for refused_call in (
            append_member(store, RUN, played.lease_id, 0),
            offer(store, RUN, "more"),
        ):
            with pytest.raises(CapacityExhausted):
                await refused_call
        assert (await stats_of(store, RUN)).is_full
        assert await extend(store, RUN, played.lease_id, *held) == []
        assert await return_(store, RUN, returned.lease_id, played=1) == (1, 0)
        await announce(store, RUN, 1, held[0], credits=1000)
        assert await ack(store, RUN, held[0]) == ""
        assert await ack(store, RUN, held[1], "unusable") == ""
        assert await return_(store, RUN, held[2], set_aside=True) == (1, 1)
        assert await requeue(store, RUN, "t2") == 1
        assert len((await lease(store, RUN, Stage.SCORED, num=9)).leases) == 2
        assert (await reopen(store, RUN, held[3])).leases
        assert (await lease_tasks(store, RUN)).leases
        stats = await stats_of(store, RUN)
        assert (stats.training.num_groups_consumed, stats.training.num_groups_training) == (1, 3)
        await store.close()


async def test_a_lease_costs_redis_the_same_however_many_groups_wait(
    own_redis: RedisServer,
) -> None:
    """It read the name of each waiting group: 39 ms of Redis at 40,000."""
    store = RedisStore(own_redis.url, QueueLimits(), timeout_s=PATIENCE_S)
    await announce(store, RUN)
    await offer(store, RUN, *map(str, range(12)))
    for _ in range(12):
        await play(store, RUN)
    with redis.Redis.from_url(own_redis.url) as client:

        async def least_usec() -> int:
            costs = []
            for _ in range(6):
                client.config_resetstat()
                assert len((await lease(store, RUN, Stage.UNSCORED)).leases) == 1
                costs.append(int(client.info("commandstats")["cmdstat_evalsha"]["usec"]))
            return min(costs)

        few = await least_usec()
        waiting = {f"behind/{number}": 10**6 + number for number in range(50_000)}
        client.zadd(f"dialoop:{{{RUN}}}:ready:unscored", waiting)
        assert await least_usec() < 5 * few + 1000
    await store.close()
