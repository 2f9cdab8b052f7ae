"""For how long the oldest task or group has been in each state, as every store tells it."""

from __future__ import annotations

from dialoop.trajectory import Purpose, Stage
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    clock,
    lease,
    lease_task,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append_member,
    make_task,
    offer_tasks,
    stats_of,
)

GROUP_SIZE = None  # groups of several sizes


async def ages(store: QueueStore, run: str) -> dict[str, float]:
    return dict((await stats_of(store, run)).training.oldest_s)


async def test_the_oldest_of_each_state_has_an_age_and_an_empty_state_has_none(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    assert await ages(store, run) == {}
    for name in ("a", "b", "c"):
        await offer_tasks(store, run, [make_task(name, num_trajectories=1)])
        clock.pass_s(2)
    assert await ages(store, run) == {"offered": 6.0}
    first = await lease_task(store, run)
    clock.pass_s(1.5)
    second = await lease_task(store, run)
    clock.pass_s(1)
    assert await ages(store, run) == {"offered": 4.5, "leased": 2.5}, "of task c, and of the first"
    await append_member(store, run, second.lease_id, 0)
    clock.pass_s(3)
    assert await ages(store, run) == {"offered": 7.5, "leased": 5.5, "unscored": 3.0}
    await append_member(store, run, first.lease_id, 0)
    await score(store, run)
    clock.pass_s(0.25)
    assert await ages(store, run) == {"offered": 7.75, "unscored": 0.25, "scored": 0.25}


async def test_a_group_that_comes_back_keeps_its_age_and_one_that_is_held_has_none(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer_tasks(store, run, [make_task("a", num_trajectories=1)])
    await append_member(store, run, (await lease_task(store, run)).lease_id, 0)
    clock.pass_s(10)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert await ages(store, run) == {}
    clock.pass_s(5)
    await return_(store, run, held.lease_id)
    assert await ages(store, run) == {"unscored": 15.0}


async def test_evaluations_have_ages_of_their_own(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    tasks = [make_task(name, num_trajectories=1, purpose=Purpose.EVALUATION) for name in "ab"]
    await offer_tasks(store, run, [*tasks, make_task("c", num_trajectories=1)])
    held = await lease_task(store, run)
    clock.pass_s(4)
    await append_member(store, run, held.lease_id, 0)
    await lease_task(store, run)
    clock.pass_s(1)
    stats = await stats_of(store, run)
    assert dict(stats.evaluation.oldest_s) == {"leased": 1.0, "scored": 1.0}
    assert dict(stats.training.oldest_s) == {"offered": 5.0}
