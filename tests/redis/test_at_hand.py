"""Groups handed out by the process that appended them: the bytes in Redis, but not read again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import redis
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop_services.replay.redis_store.at_hand import PayloadsAtHand
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import FinishedMembers, QueueLimits

from tests.support.redis_server import RedisServer, new_run, own_redis  # noqa: F401
from tests.support.replay_store_world import lease
from tests.support.samples.replay_samples import (
    announce,
    append,
    bare_group,
    lease_tasks,
    make_task,
    offer_tasks,
    purge,
    stage_name,
)

pytestmark = pytest.mark.redis
LARGE = "d" * 20_000
Make = Callable[..., RedisStore]


@pytest_asyncio.fixture
async def make(own_redis: RedisServer) -> AsyncIterator[Make]:
    """Make stores, each of which is a process of the service, on one Redis."""
    made: list[RedisStore] = []

    def new(**options: int) -> RedisStore:
        made.append(RedisStore(own_redis.url, QueueLimits(lease_s=60), **options))
        return made[-1]

    yield new
    for store in made:
        await store.close()


async def lease_one(store: RedisStore, run: str, task_id: str = "t", *, size: int = 2) -> str:
    """Offer a task and lease it; return the lease's name."""
    await announce(store, run)
    await offer_tasks(store, run, [make_task(task_id, num_trajectories=size)])
    (held,) = (await lease_tasks(store, run)).leases
    return held.lease_id


def held_by_redis(server: RedisServer, run: str, stage: str = "unscored") -> list[bytes]:
    with redis.Redis.from_url(server.url) as client:
        return [fields[b"b"] for _, fields in client.xrange(f"dialoop:{{{run}}}:{stage}")]


def bytes_from(server: RedisServer) -> int:
    """Return how many bytes this Redis has sent."""
    with redis.Redis.from_url(server.url) as client:
        return int(client.info("stats")["total_net_output_bytes"])


async def parts_of(store: RedisStore, run: str, stage: Stage = Stage.UNSCORED) -> list[bytes]:
    """Lease what is ready; return the bytes of each group."""
    request = pb.LeaseGroupsRequest(
        run=run, stage=stage_name(stage), worker="w", max_groups=10, lease_s=60
    )
    return [b"".join(held.parts) for held in (await store.lease_groups(request)).leases]


async def append_whole(store: RedisStore, run: str, lease_id: str) -> None:
    await append(store, run, Stage.UNSCORED, bare_group("t", lease_id, content=LARGE))


async def append_members(store: RedisStore, run: str, lease_id: str, *members: int) -> None:
    """Append members in one call; one that is there already is refused."""
    group = bare_group("t", lease_id, content=LARGE).group
    items = [
        FinishedMembers(lease_id, member, [group.trajectories[member]], 0) for member in members
    ]
    await store.append_members(run, items)


@pytest.mark.parametrize(
    "calls",
    [None, [(0, 1)], [(1,), (0,)], [(0,), (0,), (0, 1)]],
    ids=["whole", "one", "two", "again"],
)
async def test_what_was_appended_here_is_not_read_again(
    make: Make, own_redis: RedisServer, calls: list[tuple[int, ...]] | None
) -> None:
    store, run = make(), new_run()
    lease_id = await lease_one(store, run)
    if calls is None:
        await append_whole(store, run, lease_id)
    for members in calls or ():
        await append_members(store, run, lease_id, *members)
    (stored,) = held_by_redis(own_redis, run)
    sent = bytes_from(own_redis)
    assert await parts_of(store, run) == [stored]
    assert bytes_from(own_redis) - sent < len(LARGE)
    assert trajectory_pb2.Group.FromString(stored).trajectories[1].task_key == LARGE


async def test_a_scored_group_is_not_read_again(make: Make, own_redis: RedisServer) -> None:
    store, run = make(), new_run()
    await append_whole(store, run, await lease_one(store, run))
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    await append(store, run, Stage.SCORED, bare_group("t", held.lease_id, content=LARGE))
    (stored,) = held_by_redis(own_redis, run, "scored")
    sent = bytes_from(own_redis)
    assert await parts_of(store, run, Stage.SCORED) == [stored]
    assert bytes_from(own_redis) - sent < len(LARGE)


@pytest.fixture
def never_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no group be missing that Redis took to be at hand."""

    def fail(*_: object) -> None:
        raise AssertionError("a second look was needed")

    monkeypatch.setattr(RedisStore, "_read_absent", fail)


@pytest.mark.usefixtures("never_absent")
async def test_another_process_reads_them(make: Make, own_redis: RedisServer) -> None:
    store, other, run, its_run = make(), make(), new_run(), new_run()
    own = bare_group("t", await lease_one(other, its_run), content="of the same number")
    await append(other, its_run, Stage.UNSCORED, own)
    await append_whole(store, run, await lease_one(store, run))
    assert await parts_of(other, run) == held_by_redis(own_redis, run)


@pytest.mark.usefixtures("never_absent")
async def test_members_of_two_processes_are_read(make: Make, own_redis: RedisServer) -> None:
    store, other, run = make(), make(), new_run()
    lease_id = await lease_one(store, run)
    await append_members(other, run, lease_id, 0)
    await append_members(store, run, lease_id, 1)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)


@pytest.mark.usefixtures("never_absent")
async def test_what_is_delivered_again_is_read(make: Make, own_redis: RedisServer) -> None:
    store, run = make(), new_run()
    await append_whole(store, run, await lease_one(store, run))
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    back = pb.ReturnRequest(run=run, items=[pb.ReturnItem(lease_id=held.lease_id, reason="later")])
    await store.apply(back, pb.ReturnResponse)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)


async def test_a_group_of_which_the_append_had_no_answer_is_read(
    make: Make, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = make(), new_run()
    monkeypatch.setattr(PayloadsAtHand, "complete", lambda *_: None)
    await append_whole(store, run, await lease_one(store, run))
    assert await parts_of(store, run) == held_by_redis(own_redis, run)


async def test_a_group_that_goes_meanwhile_is_not_handed_out(
    make: Make, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = make(), new_run()
    await append_whole(store, run, await lease_one(store, run))

    def empty_redis(*_: object) -> tuple[bytes, ...]:
        with redis.Redis.from_url(own_redis.url) as client:
            client.flushall()
        return ()

    monkeypatch.setattr(PayloadsAtHand, "take", empty_redis)
    answer = await lease(store, run, Stage.UNSCORED)
    assert (len(answer.leases), answer.empty_reason) == (0, pb.EMPTY_REASON_NO_GROUPS)


async def test_a_group_of_the_same_name_in_another_life_of_the_run_is_its_own(
    make: Make, own_redis: RedisServer
) -> None:
    """As after a Redis that lost its last second, where names and numbers come again."""
    store, run = make(), new_run()
    await append_whole(store, run, await lease_one(store, run))
    await purge(store, run)
    new = bare_group("t", await lease_one(store, run), content="new")
    await append(store, run, Stage.UNSCORED, new)
    (leased,) = await parts_of(store, run)
    assert [leased] == held_by_redis(own_redis, run)
    assert trajectory_pb2.Group.FromString(leased).trajectories[0].task_key == "new"


@pytest.mark.usefixtures("never_absent")
async def test_a_group_of_fewer_members_is_not_read_again(
    make: Make, own_redis: RedisServer
) -> None:
    store, run = make(), new_run()
    await announce(store, run)
    await offer_tasks(store, run, [make_task("t", num_trajectories=3, min_trajectories=2)])
    for attempt in range(store.limits.max_attempts):
        (held,) = (await lease_tasks(store, run)).leases
        if not attempt:
            await append_members(store, run, held.lease_id, 0, 1)
        failed = pb.ReturnItem(lease_id=held.lease_id, reason="broken", failed=True)
        await store.apply(pb.ReturnRequest(run=run, items=[failed]), pb.ReturnResponse)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)


async def test_of_several_only_what_is_absent_is_read(
    make: Make, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two payloads make room between the lease's look and its answer."""
    store, run = make(), new_run()
    for name in "abc":
        lease_id = await lease_one(store, run, name)
        await append(store, run, Stage.UNSCORED, bare_group(name, lease_id, content=name))
    at_hand, take = store._at_hand, PayloadsAtHand.take

    def take_late(kept: PayloadsAtHand, marks: str) -> tuple[bytes, ...]:
        for number in (1, 3):
            at_hand._remove(number)
        return take(kept, marks)

    monkeypatch.setattr(PayloadsAtHand, "take", take_late)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)


async def test_a_lease_that_overtakes_the_answer_of_the_append_is_whole(
    make: Make, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = make(), new_run()
    lease_id = await lease_one(store, run)
    complete, late = PayloadsAtHand.complete, list[tuple[str, bytes]]()
    monkeypatch.setattr(PayloadsAtHand, "complete", lambda _, *what: late.append(what))
    await append_whole(store, run, lease_id)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)
    for what in late:
        complete(store._at_hand, *what)
    assert store._at_hand._num_bytes == 0


def test_what_is_kept_is_bounded_heads_and_all() -> None:
    at_hand = PayloadsAtHand(10_000)
    for number in range(1, 200):
        at_hand.complete(at_hand.add(b"p" * 100), b"h" * 1000)
        at_hand.add(b"")
        assert at_hand._num_bytes <= 10_000
        if number % 3 == 0:
            assert at_hand.take(f"{at_hand.keeper}/{number}")
    kept = sum(map(len, (*at_hand._payloads.values(), *at_hand._heads.values())))
    assert 5_000 < kept < 10_000
    assert min(at_hand._payloads) >= at_hand.since > 150
    assert len(at_hand._payloads) == len(at_hand._heads)


async def test_a_broken_answer_fails_the_appends_and_not_those_after_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the script had run left all later appends of the run waiting."""
    store, run = make(), new_run()
    lease_id = await lease_one(store, run)
    with monkeypatch.context() as patch:
        patch.setattr(PayloadsAtHand, "complete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await append_whole(store, run, lease_id)
    again = bare_group("t", lease_id, content=LARGE)
    (outcome,) = await append(store, run, Stage.UNSCORED, again)
    assert outcome.status == pb.APPEND_STATUS_DUPLICATE


@pytest.mark.parametrize("at_hand_bytes", [0, 60_000])
async def test_above_the_limit_the_oldest_are_read(
    make: Make, own_redis: RedisServer, at_hand_bytes: int
) -> None:
    store, run = make(at_hand_bytes=at_hand_bytes), new_run()
    for name in "abc":
        lease_id = await lease_one(store, run, name)
        await append(store, run, Stage.UNSCORED, bare_group(name, lease_id, content=LARGE))
    sent = bytes_from(own_redis)
    assert await parts_of(store, run) == held_by_redis(own_redis, run)
    # A group has 40 kB; one of them fits into 60.
    num_read = (bytes_from(own_redis) - sent) // (2 * len(LARGE))
    assert num_read - 3 == (2 if at_hand_bytes else 3)
