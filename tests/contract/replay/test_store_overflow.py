"""What every store does with one group more than may wait: none is split, credits come back."""

from __future__ import annotations

import pytest
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    ack,
    clock,
    lease,
    lease_task,
    names_of,
    ready_to_train,
    return_,
    run,
    score,
    set_overflow,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append,
    append_member,
    bare_group,
    lease_tasks,
    make_task,
    offer,
    offer_tasks,
    play,
    stats_of,
)


async def test_block_starts_no_group_that_might_find_no_room(store: QueueStore, run: str) -> None:
    set_overflow(store, "block", most=3)
    assert await announce(store, run, credits=9) == 3
    await offer(store, run, "a", "b", "c", "d", "e")
    await play(store, run)
    await play(store, run)
    await score(store, run)
    answer = await lease_tasks(store, run, 9)
    assert [held.task.task_id for held in answer.leases] == ["c"], "two wait, and one is played"
    assert (await lease_tasks(store, run)).empty_reason == pb.EMPTY_REASON_NO_CREDITS
    await lease(store, run, Stage.SCORED)
    assert (await stats_of(store, run)).credits == 1, "the trainer took one"


async def test_reject_drops_the_new_group_whole_and_for_good(store: QueueStore, run: str) -> None:
    set_overflow(store, "reject", most=1)
    await announce(store, run, credits=2)
    await offer(store, run, "a", "b", "c")
    await play(store, run)
    held = await lease_task(store, run)
    assert not (await append_member(store, run, held.lease_id, 0)).reason
    for _ in range(2):  # also when its answer was lost
        outcome = await append_member(store, run, held.lease_id, 1)
        assert (outcome.status, outcome.reason) == (pb.APPEND_STATUS_REJECTED, "NO_ROOM")
    stats = await stats_of(store, run)
    assert stats.training.num_groups_dropped == {"no_room": 1}
    assert stats.training.num_trajectories_dropped == {"no_room": 2}
    assert (stats.credits, stats.num_rejected_appends) == (1, 2)
    assert names_of((await lease(store, run, Stage.UNSCORED, num=9)).leases) == ["a"]
    assert (await lease_task(store, run)).task.task_id == "c", "the dropped one is not played again"


async def test_drop_oldest_drops_the_group_that_waits_longest(store: QueueStore, run: str) -> None:
    set_overflow(store, "drop_oldest", most=2)
    await announce(store, run, credits=9)
    await offer(store, run, "a", "b", "c", "d")
    for _ in "abc":
        await play(store, run)
    stats = await stats_of(store, run)
    assert stats.training.num_groups_dropped == {"dropped_oldest": 1}
    assert stats.training.num_trajectories_dropped == {"dropped_oldest": 2}
    assert stats.credits == 7
    await score(store, run)
    await play(store, run)
    assert not (await lease(store, run, Stage.SCORED)).leases, "b was older, though scored"
    assert names_of((await lease(store, run, Stage.UNSCORED, num=9)).leases) == ["c", "d"]


async def test_a_group_that_a_scorer_holds_is_not_dropped_for_another(
    store: QueueStore, run: str
) -> None:
    set_overflow(store, "drop_oldest", most=1)
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    task = await lease_task(store, run)
    (outcome,) = await append(store, run, Stage.UNSCORED, bare_group("b", task.lease_id))
    assert outcome.reason == "NO_ROOM"
    item = pb.AppendItem(group=held.group, lease_id=held.lease_id)
    (outcome,) = await append(store, run, Stage.SCORED, item)
    assert outcome.status == pb.APPEND_STATUS_APPENDED
    assert await ack(store, run, held.lease_id) == ""
    assert (await stats_of(store, run)).training.num_groups_dropped == {"no_room": 1}


async def test_a_scored_group_is_dropped_though_its_scorer_has_not_acknowledged(
    store: QueueStore, run: str
) -> None:
    set_overflow(store, "drop_oldest", most=1)
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    lease_id = await score(store, run, acknowledge=False)
    await play(store, run)
    assert await ack(store, run, lease_id) == "", "its work is done, whatever became of it"
    assert (await stats_of(store, run)).training.num_groups_dropped == {"dropped_oldest": 1}


async def test_the_bound_is_none_for_evaluations_nor_for_the_trainers_own(
    store: QueueStore, run: str
) -> None:
    set_overflow(store, "reject", most=1)
    await ready_to_train(store, run, "a")
    await lease(store, run, Stage.SCORED)
    await offer(store, run, "e1", "e2", purpose=Purpose.EVALUATION)
    await offer(store, run, "b")
    for _ in range(2):
        await play(store, run, stage=Stage.EVALUATION)
    await play(store, run)
    assert not (await stats_of(store, run)).training.num_groups_dropped


@pytest.mark.parametrize("ending", ["returned", "expired"])
async def test_a_group_that_closes_short_needs_room_too(
    store: QueueStore, run: str, clock: Clock, ending: str
) -> None:
    set_overflow(store, "reject", most=1)
    await announce(store, run)
    await offer_tasks(store, run, [make_task(name, min_trajectories=1) for name in "ab"])
    await play(store, run)
    for _ in range(store.limits.max_attempts):
        held = await lease_task(store, run)
        if ending == "expired":
            clock.pass_s(61)
            continue
        if held.attempt == 1:
            await append_member(store, run, held.lease_id, 0)
        await return_(store, run, held.lease_id, failed=True)
    expected = {"no_room": 1} if ending == "returned" else {"lease_expired": 1}
    assert (await stats_of(store, run)).training.num_groups_dropped == expected
