"""Records that an older version of the queue wrote into Redis."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import pytest
import pytest_asyncio
import redis
from dialoop.trajectory import Stage
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import ack, extend, lease, lease_task, score
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append_member,
    make_task,
    offer,
    play,
    purge,
    stats_of,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def store(redis_url: str, clock: Clock) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, QueueLimits(lease_s=60), clock=clock)
    yield made
    await made.close()


class OldRecords:
    """Rewrites the records of a run as an older version wrote them."""

    def __init__(self, url: str, run: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._prefix = f"dialoop:{{{run}}}:"

    def change(
        self, task_id: str, *, without: Iterable[str] = (), add: Mapping[str, Any] | None = None
    ) -> None:
        key = f"{self._prefix}ledger"
        record = json.loads(self._client.hget(key, task_id) or b"")
        record = {k: v for k, v in record.items() if k not in set(without)} | dict(add or {})
        self._client.hset(key, task_id, json.dumps(record))

    def put_bare_task(self, task_id: str) -> None:
        self._client.hset(f"{self._prefix}tasks", task_id, make_task(task_id).SerializeToString())

    def damage(self, task_id: str) -> None:
        self._client.hset(f"{self._prefix}ledger", task_id, "no record")

    def keys(self) -> list[bytes]:
        return list(self._client.keys(self._prefix.replace("{", "?").replace("}", "?") + "*"))


async def test_fields_that_a_record_lacks_have_defaults(
    store: RedisStore,
    redis_url: str,
    clock: Clock,
) -> None:
    run = new_run()
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    held = await lease_task(store, run)
    old = OldRecords(redis_url, run)
    old.change("a", without=["k", "x", "v"])
    old.change("b", without=["k", "x", "v"])
    await score(store, run)
    (group,) = (await lease(store, run, Stage.SCORED, max_staleness=1)).leases
    assert await ack(store, run, group.lease_id) == ""
    clock.pass_s(61)
    assert await extend(store, run, held.lease_id) == []
    await append_member(store, run, held.lease_id, 0)
    await append_member(store, run, held.lease_id, 1)
    assert (await stats_of(store, run)).training.num_groups_unscored == 1
    await purge(store, run)


async def test_a_task_from_before_members_is_played(store: RedisStore, redis_url: str) -> None:
    run = new_run()
    await announce(store, run)
    long = "b" * 200
    await offer(store, run, "a", long)
    old = OldRecords(redis_url, run)
    for task_id in ("a", long):
        old.change(task_id, without=["m", "x", "c", "b", "k", "v"], add={"f": 0, "g": ""})
        old.put_bare_task(task_id)
    for task_id in ("a", long):
        held = await lease_task(store, run)
        assert held.task == make_task(task_id)
        assert list(held.members) == [0, 1]
        for member in range(2):
            await append_member(store, run, held.lease_id, member)
    groups = (await lease(store, run, Stage.UNSCORED, num=2)).leases
    assert [lease.group.task.task_id for lease in groups] == ["a", long]
    await purge(store, run)


async def test_purge_reads_no_record(store: RedisStore, redis_url: str, clock: Clock) -> None:
    run = new_run()
    await announce(store, run)
    await offer(store, run, "a")
    await lease_task(store, run)
    old = OldRecords(redis_url, run)
    old.damage("a")
    assert old.keys()
    clock.pass_s(61)
    await purge(store, run)
    assert old.keys() == []
