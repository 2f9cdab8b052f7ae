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
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import (
    Acknowledgement,
    AppendStatus,
    GroupLeases,
    GroupQuery,
    Limits,
    Outcome,
    State,
)

from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer, new_run, own_redis, redis_url  # noqa: F401
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    assert_adds_up,
    bare_group,
    bare_task,
    play,
)

pytestmark = pytest.mark.redis
RUN = "run"
LEASE_S = 600.0
LIMITS = Limits(lease_s=LEASE_S)


@pytest_asyncio.fixture
async def store(own_redis: RedisServer) -> AsyncIterator[RedisStore]:
    async with opened(own_redis.url) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(
    url: str, limits: Limits = LIMITS, clock: Callable[[], float] | None = None
) -> AsyncIterator[RedisStore]:
    """A store that waits for a disk that stalls: each of its writes is flushed."""
    made = RedisStore(url, limits, timeout_s=PATIENCE_S, clock=clock)
    yield made
    await made.close()


async def lease(store: RedisStore, stage: Stage, num: int = 10) -> GroupLeases:
    query = GroupQuery(stage=stage, worker="w", max_groups=num, lease_s=LEASE_S)
    return await store.lease_groups(RUN, query)


async def fill(store: RedisStore, num_groups: int) -> None:
    await announce(store, RUN, credits=num_groups)
    await store.offer_tasks(RUN, [bare_task(f"t{i}") for i in range(num_groups)], None)
    for _ in range(num_groups):
        await play(store, RUN)


async def score_all(store: RedisStore) -> None:
    for held in (await lease(store, Stage.UNSCORED, 100)).leases:
        task_id = held.lease_id.split("/", 2)[2]
        await store.append_groups(RUN, Stage.SCORED, [bare_group(task_id, held.lease_id)])
        await consume(store, held.lease_id)


async def consume(store: RedisStore, lease_id: str) -> str:
    item = Acknowledgement(lease_id=lease_id, outcome=Outcome.CONSUMED)
    return (await store.acknowledge(RUN, [item]))[0]


async def test_a_crash_of_redis_between_lease_and_acknowledge_loses_nothing(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await fill(store, 6)
    await score_all(store)
    held = (await lease(store, Stage.SCORED, 4)).leases
    before = await store.stats(RUN)
    own_redis.kill()
    with pytest.raises(Unavailable) as caught:
        await store.stats(RUN)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    own_redis.start()
    assert await store.stats(RUN) == before
    assert [await consume(store, lease.lease_id) for lease in held] == [""] * 4
    assert [await consume(store, lease.lease_id) for lease in held] == [""] * 4
    rest = (await lease(store, Stage.SCORED)).leases
    assert {lease.payload for lease in rest}.isdisjoint({lease.payload for lease in held})
    assert len(rest) == 2
    stats = await store.stats(RUN)
    assert_adds_up(stats)
    assert stats.training.groups[State.CONSUMED] == 4


async def test_connections_that_do_not_close_do_not_hide_that_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(*_: object, **__: object) -> None:
        raise redis.TimeoutError("Timed out closing connection")

    async with opened(f"unix://{tmp_path}/nobody.sock") as store:
        with monkeypatch.context() as patched:
            patched.setattr(redis.asyncio.ConnectionPool, "disconnect", stuck)
            with pytest.raises(Unavailable):
                await store.stats(RUN)


async def test_an_append_repeated_after_a_crash_is_taken_once(
    store: RedisStore,
    own_redis: RedisServer,
) -> None:
    await announce(store, RUN)
    await store.offer_tasks(RUN, [bare_task("a")], None)
    (held,) = (await store.lease_tasks(RUN, worker="c", max_tasks=1, lease_s=LEASE_S)).leases
    group = bare_group("a", held.lease_id)
    await store.append_groups(RUN, Stage.UNSCORED, [group])
    own_redis.kill()
    own_redis.start()
    with contextlib.suppress(Unavailable):
        await store.check()
    (again,) = await store.append_groups(RUN, Stage.UNSCORED, [group])
    assert again.status is AppendStatus.DUPLICATE
    assert (await store.stats(RUN)).training.num_trajectories_generated == 2


class Loop:
    """A collector, a scorer and a trainer that try again whenever the store is away.

    What they held by then is theirs for so long that only a clock put forward takes it from them.
    """

    def __init__(self, store: RedisStore, clock: Clock, num_tasks: int) -> None:
        self.store = store
        self.clock = clock
        self.num_tasks = num_tasks
        self.ended = asyncio.Event()
        self.consumed: list[bytes] = []

    async def collect(self) -> None:
        leases = await self.store.lease_tasks(RUN, worker="c", max_tasks=4, lease_s=LEASE_S)
        for held in leases.leases:
            task_id = held.payload[:-1].decode()
            group = bare_group(task_id, held.lease_id, attempt=held.attempt)
            await self.store.append_groups(RUN, Stage.UNSCORED, [group])

    async def score(self) -> None:
        for held in (await lease(self.store, Stage.UNSCORED, 4)).leases:
            task_id = held.lease_id.split("/", 2)[2]
            attempt = int(held.payload[:-2].decode().rpartition("#")[2])
            group = bare_group(task_id, held.lease_id, attempt=attempt)
            await self.store.append_groups(RUN, Stage.SCORED, [group])
            await consume(self.store, held.lease_id)

    async def train(self) -> None:
        found = await lease(self.store, Stage.SCORED, 4)
        self.consumed += [
            held.payload for held in found.leases if await consume(self.store, held.lease_id) == ""
        ]
        counts = (await self.store.stats(RUN)).training
        if counts.groups[State.CONSUMED] == self.num_tasks:
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
    limits = Limits(max_attempts=100, max_deliveries=100, lease_s=LEASE_S)
    async with opened(own_redis.url, limits, clock) as store:
        loop = Loop(store, clock, num_tasks=60)
        await announce(store, RUN, credits=60)
        await store.offer_tasks(RUN, [bare_task(f"t{i}") for i in range(60)], None)
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            for work in (loop.collect, loop.score, loop.train):
                group.create_task(loop.keep_on(work))
            group.create_task(crash(own_redis, times=3))
        stats = await store.stats(RUN)
    assert_adds_up(stats)
    assert stats.training.groups[State.CONSUMED] == 60
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
    assert (await lease(store, Stage.UNSCORED)).leases == ()
    async with opened(own_redis.url, clock=lambda: time.time() + LEASE_S + 1) as later:
        found = await lease(later, Stage.UNSCORED)
    assert found.leases[0].num_deliveries == 2
    assert (await store.stats(RUN)).num_redelivered == 1


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
        drop = Acknowledgement(lease_id=held[0].lease_id, outcome=Outcome.DROPPED, reason="x")
        await store.acknowledge(RUN, [drop])
        assert client.xlen(stream) == 4
        assert client.xpending(stream, "workers")["pending"] == 2
        await store.purge(RUN)
        assert list(client.scan_iter("dialoop:*")) == []


async def test_workers_in_parallel_never_share_a_group(redis_url: str) -> None:
    run, stores = new_run(), [RedisStore(redis_url, LIMITS) for _ in range(4)]
    await announce(stores[0], run, credits=80)
    await stores[0].offer_tasks(run, [bare_task(f"t{i}") for i in range(80)], None)

    async def work(store: RedisStore) -> list[str]:
        mine: list[str] = []
        while leases := (
            await store.lease_tasks(run, worker="c", max_tasks=3, lease_s=LEASE_S)
        ).leases:
            mine.extend(held.lease_id.split("/", 2)[2] for held in leases)
        return mine

    found = [task for tasks in await asyncio.gather(*map(work, stores)) for task in tasks]
    assert len(found) == len(set(found)) == 80
    await stores[0].purge(run)
    for store in stores:
        await store.close()
