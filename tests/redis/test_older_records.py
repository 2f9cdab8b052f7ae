"""Records in Redis that this version of the queue does not read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis
from dialoop.errors import PreconditionFailed
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import lease_task
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    make_task,
    offer,
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
    """Changes the records of a run behind the store's back."""

    def __init__(self, url: str, run: str) -> None:
        self.run = run
        self._client = redis.Redis.from_url(url)
        self._prefix = f"dialoop:{{{run}}}:"

    def set_format(self, written: str | None) -> None:
        """Write the format's name; None: as before it had one."""
        if written is None:
            self._client.hdel(f"{self._prefix}meta", "format")
        else:
            self._client.hset(f"{self._prefix}meta", "format", written)

    def close(self) -> None:
        self._client.close()

    def dump(self) -> dict[bytes, bytes | None]:
        return {key: self._client.dump(key) for key in self.keys()}

    def damage(self, task_id: str) -> None:
        self._client.hset(f"{self._prefix}ledger", task_id, "no record")

    def keys(self) -> list[bytes]:
        return list(self._client.keys(self._prefix.replace("{", "?").replace("}", "?") + "*"))


@pytest.fixture
def old(redis_url: str) -> Iterator[OldRecords]:
    made = OldRecords(redis_url, new_run())
    yield made
    made.close()


@pytest.mark.parametrize("written", [None, "3", "5"])
async def test_a_run_in_another_format_is_refused_and_can_be_purged(
    store: RedisStore, old: OldRecords, written: str | None
) -> None:
    run = old.run
    await announce(store, run)
    await offer(store, run, "a")
    old.set_format(written)
    kept = old.dump()
    for request in (lease_task(store, run), offer(store, run, "b"), stats_of(store, run)):
        with pytest.raises(PreconditionFailed, match="Purge the run") as caught:
            await request
        assert caught.value.reason == "STORE_FORMAT"
    assert old.dump() == kept
    await purge(store, run)
    await announce(store, run)
    await offer(store, run, "a")
    assert (await lease_task(store, run)).task == make_task("a")
    await purge(store, run)


async def test_purge_reads_no_record(store: RedisStore, old: OldRecords, clock: Clock) -> None:
    run = old.run
    await announce(store, run)
    await offer(store, run, "a")
    await lease_task(store, run)
    old.damage("a")
    assert old.keys()
    clock.pass_s(61)
    await purge(store, run)
    assert old.keys() == []
