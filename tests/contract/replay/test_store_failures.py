"""When a store gives a group up, and what it keeps of it: the same facts on memory and Redis."""

from __future__ import annotations

import pytest
from dialoop.errors import NotFound
from dialoop.trajectory import Stage
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    MAX_DEAD_LETTERS,
    MAX_FINISHED,
    ack,
    clock,
    dead_letters,
    extend,
    lease,
    ready_to_train,
    reopen,
    requeue,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    make_task,
    offer,
    offer_tasks,
    play,
    stats_of,
)


async def test_a_group_delivered_too_often_is_a_dead_letter_that_can_come_back(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run, credits=1)
    await offer(store, run, "a")
    await play(store, run)
    await score(store, run)
    for delivery in (1, 2, 3):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert held.num_deliveries == delivery
        clock.pass_s(61)
    stats = await stats_of(store, run)
    assert (stats.num_dead_letters, stats.num_redelivered, stats.credits) == (1, 2, 1)
    assert stats.training.num_groups_dropped == {"dead_letter": 1}
    assert stats.training.num_trajectories_dropped == {"dead_letter": 2}
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    (letter,) = await dead_letters(store, run, 5)
    assert (letter.group_id, int(letter.stage)) == ("a", Stage.SCORED)
    assert (letter.reason, letter.num_deliveries) == ("lease_expired", 3)
    with pytest.raises(NotFound) as caught:
        await requeue(store, run, "a", "b")
    assert caught.value.reason == "GROUP_NOT_FOUND"
    assert await requeue(store, run, "a") == 1
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    assert (held.num_deliveries, held.group) == (1, letter.group)
    assert await ack(store, run, held.lease_id) == ""
    stats = await stats_of(store, run)
    assert (stats.num_dead_letters, stats.training.num_groups_dropped) == (0, {})
    assert stats.training.num_trajectories_consumed == 2


async def test_a_lease_that_ran_out_is_no_failure_once_its_holder_is_back(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    for _ in range(5):
        clock.pass_s(61)
        assert await extend(store, run, held.lease_id) == []
    # Those who never came back count, each of them.
    for _ in range(3):
        assert (await stats_of(store, run)).num_dead_letters == 0
        clock.pass_s(61)
        await lease(store, run, Stage.SCORED)
    assert (await stats_of(store, run)).num_dead_letters == 1


@pytest.mark.parametrize("how", ["reopened", "trained"])
async def test_a_lease_whose_work_was_done_may_run_out_whatever_its_group_was_blamed_for(
    store: QueueStore, run: str, clock: Clock, how: str
) -> None:
    await ready_to_train(store, run, "a")
    for _ in range(2):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        await return_(store, run, held.lease_id, failed=True)
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    if how == "trained":
        await announce(store, run, 1, held.lease_id, credits=4)
    for _ in range(3):  # its trainer is away, comes back to it, and is killed in the recovery
        if how == "reopened":
            (again,) = (await reopen(store, run, held.lease_id)).leases
            assert again == held
        clock.pass_s(61)
        assert (await stats_of(store, run)).num_dead_letters == 0
        assert await extend(store, run, held.lease_id) == []
    clock.pass_s(61)
    # To another it is a group like any other: a crash with it in work is the third failure.
    await lease(store, run, Stage.SCORED)
    clock.pass_s(61)
    assert (await stats_of(store, run)).num_dead_letters == 1


async def test_of_too_many_dead_letters_the_oldest_is_forgotten_and_counted(
    store: QueueStore, run: str
) -> None:
    names = "abcdef"
    await ready_to_train(store, run, *names)
    held = (await lease(store, run, Stage.SCORED, num=6)).leases
    for group_lease in held:
        await return_(store, run, group_lease.lease_id, set_aside=True)
    letters = await dead_letters(store, run, 10)
    assert [letter.group_id for letter in letters] == ["c", "d", "e", "f"]
    assert letters[0].group == held[2].group
    stats = await stats_of(store, run)
    assert stats.num_dead_letters == MAX_DEAD_LETTERS == 4
    assert stats.training.num_groups_dropped == {"dead_letter": 4, "dead_letter_forgotten": 2}
    assert stats.training.num_trajectories_dropped == {"dead_letter": 8, "dead_letter_forgotten": 4}
    with pytest.raises(NotFound):
        await requeue(store, run, "a")
    assert await requeue(store, run, "c", "f") == 2
    assert (await stats_of(store, run)).training.num_groups_dropped["dead_letter"] == 2


async def test_only_failed_returns_lead_to_the_dead_letters(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a")
    for _ in range(5):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert await return_(store, run, held.lease_id) == (1, 0)
        assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    for dropped in (0, 0, 1):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert await return_(store, run, held.lease_id, failed=True) == (1, dropped)
        assert await return_(store, run, held.lease_id, failed=True) == (0, 0)
    assert (await dead_letters(store, run, 5))[0].reason == "broken"


async def test_a_group_that_is_set_aside_is_a_dead_letter_at_once(
    store: QueueStore, run: str
) -> None:
    await ready_to_train(store, run, "a", "b")
    held, other = (await lease(store, run, Stage.SCORED, num=2)).leases
    assert await return_(store, run, held.lease_id, set_aside=True) == (1, 1)
    assert await return_(store, run, held.lease_id, set_aside=True) == (0, 0)
    assert await return_(store, run, other.lease_id) == (1, 0)
    (letter,) = await dead_letters(store, run, 5)
    assert (letter.group_id, letter.reason, letter.group) == ("a", "broken", held.group)
    assert (await stats_of(store, run)).training.num_groups_dropped == {"dead_letter": 1}
    (again,) = (await lease(store, run, Stage.SCORED, num=5)).leases
    assert again.group == other.group


async def test_of_tasks_that_ended_the_newest_are_remembered(store: QueueStore, run: str) -> None:
    names = [f"t{i}" for i in range(MAX_FINISHED + 3)]
    await announce(store, run)
    await offer(store, run, *names)
    for _ in names:
        await play(store, run)
        (held,) = (await lease(store, run, Stage.UNSCORED)).leases
        assert await ack(store, run, held.lease_id, "uniform_reward") == ""
        assert await ack(store, run, held.lease_id, "uniform_reward") == "", "it is remembered"
    again = [make_task(name) for name in names]
    assert (await offer_tasks(store, run, again)).num_known == MAX_FINISHED
    counts = (await stats_of(store, run)).training
    assert counts.num_groups_dropped == {"uniform_reward": len(names)}, "and still counted"
