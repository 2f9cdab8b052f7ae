"""Redis dies, workers die: nothing is lost and nothing is doubled."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from dialoop.errors import Unavailable
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import RedisServer, new_run, own_redis, redis_url  # noqa: F401
from tests.support.replay_store_world import ack, names_of
from tests.support.replay_store_world import lease as lease_groups
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append,
    assert_adds_up,
    bare_group,
    counts_of,
    lease_tasks,
    offer,
    play,
    purge,
    stats_of,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.redis
RUN = "run"
LEASE_S = 600.0
LIMITS = QueueLimits(lease_s=LEASE_S)


@pytest_asyncio.fixture
async def store(own_redis: RedisServer) -> AsyncIterator[RedisStore]:
    async with open_store(own_redis.url) as made:
        yield made


@contextlib.asynccontextmanager
async def open_store(
    url: str, limits: QueueLimits = LIMITS, clock: Callable[[], float] | None = None
) -> AsyncIterator[RedisStore]:
    """A store that waits for a disk that stalls: each of its writes is flushed."""
    made = RedisStore(url, limits, timeout_s=PATIENCE_S, clock=clock)
    yield made
    await made.close()


async def lease(store: RedisStore, stage: Stage, num: int = 10) -> pb.LeaseGroupsResponse:
    return await lease_groups(store, RUN, stage, num=num, lease_s=LEASE_S)


async def append_scored(store: RedisStore, held: pb.GroupLease) -> None:
    item = pb.AppendItem(group=held.group, lease_id=held.lease_id)
    await append(store, RUN, Stage.SCORED, item)


async def fill(store: RedisStore, num_groups: int) -> None:
    await announce(store, RUN, credits=num_groups)
    await offer(store, RUN, *(f"t{i}" for i in range(num_groups)))
    for _ in range(num_groups):
        await play(store, RUN)


async def score_all(store: RedisStore) -> None:
    for held in (await lease(store, Stage.UNSCORED, 100)).leases:
        await append_scored(store, held)
        await ack(store, RUN, held.lease_id)


async def test_a_crash_of_redis_between_lease_and_acknowledge_loses_nothing(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await fill(store, 6)
    await score_all(store)
    held = (await lease(store, Stage.SCORED, 4)).leases
    before = await counts_of(store, RUN)
    own_redis.kill()
    with pytest.raises(Unavailable) as caught:
        await stats_of(store, RUN)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    own_redis.start()
    assert await counts_of(store, RUN) == before
    assert [await ack(store, RUN, lease.lease_id) for lease in held] == [""] * 4
    assert [await ack(store, RUN, lease.lease_id) for lease in held] == [""] * 4
    rest = (await lease(store, Stage.SCORED)).leases
    assert set(names_of(rest)).isdisjoint(names_of(held))
    assert len(rest) == 2
    stats = await stats_of(store, RUN)
    assert_adds_up(stats)
    assert stats.training.num_groups_consumed == 4


async def test_connections_that_do_not_close_do_not_hide_that_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(*_: object, **__: object) -> None:
        raise redis.TimeoutError("Timed out closing connection")

    async with open_store(f"unix://{tmp_path}/nobody.sock") as store:
        with monkeypatch.context() as patched:
            patched.setattr(redis.asyncio.ConnectionPool, "disconnect", stuck)
            with pytest.raises(Unavailable):
                await stats_of(store, RUN)


async def test_an_append_repeated_after_a_crash_is_taken_once(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await announce(store, RUN)
    await offer(store, RUN, "a")
    (held,) = (await lease_tasks(store, RUN, 1, LEASE_S)).leases
    group = bare_group("a", held.lease_id)
    await append(store, RUN, Stage.UNSCORED, group)
    own_redis.kill()
    own_redis.start()
    with contextlib.suppress(Unavailable):
        await store.check()
    (again,) = await append(store, RUN, Stage.UNSCORED, group)
    assert again.status == pb.APPEND_STATUS_DUPLICATE
    assert (await stats_of(store, RUN)).training.num_trajectories_generated == 2


class Loop:
    """A collector, a scorer and a trainer that try again whenever the store is away.

    What they held by then is theirs for so long that only a clock put forward takes it from them.
    """

    def __init__(self, store: RedisStore, clock: Clock, num_tasks: int) -> None:
        self.store = store
        self.clock = clock
        self.num_tasks = num_tasks
        self.ended = asyncio.Event()
        self.consumed: list[str] = []

    async def collect(self) -> None:
        for held in (await lease_tasks(self.store, RUN, 4, LEASE_S)).leases:
            group = bare_group(held.task.task_id, held.lease_id)
            await append(self.store, RUN, Stage.UNSCORED, group)

    async def score(self) -> None:
        for held in (await lease(self.store, Stage.UNSCORED, 4)).leases:
            await append_scored(self.store, held)
            await ack(self.store, RUN, held.lease_id)

    async def train(self) -> None:
        leased = await lease(self.store, Stage.SCORED, 4)
        self.consumed += [
            held.group.group_id
            for held in leased.leases
            if await ack(self.store, RUN, held.lease_id) == ""
        ]
        counts = (await stats_of(self.store, RUN)).training
        if counts.num_groups_consumed == self.num_tasks:
            self.ended.set()

    async def keep_on(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self.ended.is_set():
            try:
                await work()
            except Unavailable:
                self.clock.pass_s(LEASE_S + 1)
            await asyncio.sleep(0.005)


async def crash(server: RedisServer, times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


async def test_work_goes_on_by_itself_through_crashes_and_adds_up(own_redis: RedisServer) -> None:
    clock = Clock()
    # Each crash may cost a lease a delivery, whoever holds it.
    limits = QueueLimits(max_attempts=100, max_deliveries=100, lease_s=LEASE_S)
    async with open_store(own_redis.url, limits, clock) as store:
        loop = Loop(store, clock, num_tasks=60)
        await announce(store, RUN, credits=60)
        await offer(store, RUN, *(f"t{i}" for i in range(60)))
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            for work in (loop.collect, loop.score, loop.train):
                group.create_task(loop.keep_on(work))
            group.create_task(crash(own_redis, times=3))
        stats = await stats_of(store, RUN)
    assert_adds_up(stats)
    assert stats.training.num_groups_consumed == 60
    assert stats.training.num_trajectories_generated == 120
    # An acknowledgement can be lost on its way back, never given twice.
    assert len(loop.consumed) == len(set(loop.consumed)) <= 60


def lease_and_hang(url: str, leased: object) -> None:
    async def work() -> None:
        store = RedisStore(url, LIMITS, timeout_s=PATIENCE_S)
        await lease(store, Stage.UNSCORED, 1)
        leased.set()  # type: ignore[attr-defined]
        await asyncio.sleep(600)

    asyncio.run(work())


async def test_the_group_of_a_killed_worker_is_redelivered_once_its_lease_ran_out(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await fill(store, 1)
    context = multiprocessing.get_context("spawn")
    leased = context.Event()
    worker = context.Process(target=lease_and_hang, args=(own_redis.url, leased))
    worker.start()
    assert await asyncio.to_thread(leased.wait, PATIENCE_S)
    worker.kill()
    await asyncio.to_thread(worker.join)
    assert (await lease(store, Stage.UNSCORED)).leases == []
    async with open_store(own_redis.url, clock=lambda: time.time() + LEASE_S + 1) as later:
        leased = await lease(later, Stage.UNSCORED)
    assert leased.leases[0].num_deliveries == 2
    assert (await stats_of(store, RUN)).num_redelivered == 1


async def test_only_acknowledged_entries_leave_the_streams(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await fill(store, 5)
    with redis.Redis.from_url(own_redis.url) as client:
        stream = f"dialoop:{{{RUN}}}:unscored"
        assert client.xlen(stream) == 5
        held = (await lease(store, Stage.UNSCORED, 3)).leases
        assert client.xpending(stream, "workers")["pending"] == 3
        assert client.xlen(stream) == 5
        assert await ack(store, RUN, held[0].lease_id, "oversize") == ""
        assert client.xlen(stream) == 4
        assert client.xpending(stream, "workers")["pending"] == 2
        await purge(store, RUN)
        assert list(client.scan_iter("dialoop:*")) == []


async def test_workers_in_parallel_never_share_a_group(redis_url: str) -> None:
    run, stores = new_run(), [RedisStore(redis_url, LIMITS) for _ in range(4)]
    await announce(stores[0], run, credits=80)
    await offer(stores[0], run, *(f"t{i}" for i in range(80)))

    async def work(store: RedisStore) -> list[str]:
        mine: list[str] = []
        while leases := (await lease_tasks(store, run, 3, LEASE_S)).leases:
            mine.extend(held.lease_id.split("/", 2)[2] for held in leases)
        return mine

    task_ids = [task for tasks in await asyncio.gather(*map(work, stores)) for task in tasks]
    assert len(task_ids) == len(set(task_ids)) == 80
    await purge(stores[0], run)
    for store in stores:
        await store.close()
