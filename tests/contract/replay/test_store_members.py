"""What every store does with the members of a group, and the rule by which the group closes."""

from __future__ import annotations

import pytest
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    clock,
    extend,
    lease,
    lease_task,
    names_of,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append_member,
    bare_group,
    lease_tasks,
    make_task,
    offer_tasks,
    stats_of,
)

GROUP_SIZE = None  # groups of several sizes


async def begin(
    store: QueueStore,
    run: str,
    *,
    size: int = 3,
    least: int = 0,
    purpose: Purpose = Purpose.TRAINING,
) -> pb.TaskLease:
    """Offer one task and lease it."""
    await announce(store, run)
    task = make_task("a", num_trajectories=size, min_trajectories=least, purpose=purpose)
    await offer_tasks(store, run, [task])
    return await lease_task(store, run)


async def test_what_is_finished_outlives_its_collector_and_is_not_leased_again(
    store: QueueStore, run: str, clock: Clock
) -> None:
    first = await begin(store, run)
    assert list(first.members) == [0, 1, 2]
    assert not (await append_member(store, run, first.lease_id, 1, content="kept")).reason
    counts = (await stats_of(store, run)).training
    assert (counts.num_trajectories_live, counts.num_trajectories_waiting) == (1, 1)
    clock.pass_s(61)
    second = await lease_task(store, run)
    assert (second.attempt, list(second.members)) == (2, [0, 2])
    for member in second.members:
        assert not (await append_member(store, run, second.lease_id, member)).reason
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert (held.group.group_id, held.group.task.task_id) == ("a", "a")
    assert [t.trajectory_id for t in held.group.trajectories] == ["a.0", "a.1", "a.2"]
    assert held.group.trajectories[1].task_key == "kept"
    counts = (await stats_of(store, run)).training
    assert (counts.num_trajectories_generated, counts.num_trajectories_waiting) == (3, 0)
    assert await extend(store, run, second.lease_id) == [second.lease_id], "it ended by itself"


async def test_an_append_that_is_repeated_after_the_group_closed_is_a_duplicate(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run, size=1)
    assert not (await append_member(store, run, held.lease_id, 0)).reason
    again = await append_member(store, run, held.lease_id, 0)
    assert again.status == pb.APPEND_STATUS_DUPLICATE
    other = await append_member(store, run, held.lease_id, 0, content="other")
    assert other.reason == "DIGEST_MISMATCH"


async def test_a_member_that_fails_is_topped_up_and_at_last_the_group_closes_short(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run, least=2)
    for member in (0, 2):
        assert not (await append_member(store, run, held.lease_id, member)).reason
    for attempt in (1, 2, 3):
        assert (held.attempt, list(held.members)) == ((1, [0, 1, 2]), (attempt, [1]))[attempt > 1]
        assert await return_(store, run, held.lease_id, failed=True, played=1, members=[1]) == (
            1,
            0,
        )
        if attempt < 3:
            held = await lease_task(store, run)
    stats = await stats_of(store, run)
    assert stats.training.num_groups_closed_short == stats.training.num_groups_unscored == 1
    assert stats.training.num_trajectories_generated == 5
    assert stats.training.num_trajectories_dropped == {"broken": 3}
    (unscored,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert [t.trajectory_id for t in unscored.group.trajectories] == ["a.0", "a.2"]
    assert unscored.group.task.num_trajectories == 3
    await return_(store, run, unscored.lease_id)
    await score(store, run)
    assert names_of((await lease(store, run, Stage.SCORED)).leases) == ["a"]


@pytest.mark.parametrize("least", [0, 2])
async def test_a_group_with_too_few_members_is_dropped_with_them(
    store: QueueStore, run: str, least: int
) -> None:
    held = await begin(store, run, least=least)
    await append_member(store, run, held.lease_id, 0)
    assert await return_(store, run, held.lease_id, failed=True) == (1, 0)
    assert await return_(store, run, (await lease_task(store, run)).lease_id, failed=True) == (1, 0)
    assert await return_(store, run, (await lease_task(store, run)).lease_id, failed=True) == (1, 1)
    counts = (await stats_of(store, run)).training
    assert counts.num_groups_dropped == {"broken": 1}
    assert counts.num_trajectories_dropped == {"broken": 1}
    assert counts.num_trajectories_live == counts.num_trajectories_waiting == 0


async def test_a_collector_that_dies_after_it_finished_a_member_is_not_held_against_the_rest(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await begin(store, run, size=9)
    clock.pass_s(61)
    for member in range(8):
        held = await lease_task(store, run)
        assert member in held.members
        await append_member(store, run, held.lease_id, member)
        clock.pass_s(61)
    await lease_task(store, run)
    clock.pass_s(61)
    assert not (await stats_of(store, run)).training.num_groups_dropped
    await lease_task(store, run)
    clock.pass_s(61)
    dropped = (await stats_of(store, run)).training.num_groups_dropped
    assert dropped == {"lease_expired": 1}, "three deaths with nothing finished"


async def test_a_late_member_counts_until_another_collector_has_the_task(
    store: QueueStore, run: str, clock: Clock
) -> None:
    slow = await begin(store, run)
    clock.pass_s(61)
    assert not (await append_member(store, run, slow.lease_id, 0)).reason
    fast = await lease_task(store, run)
    assert list(fast.members) == [1, 2]
    assert (await append_member(store, run, slow.lease_id, 1)).reason == "LEASE_LOST"
    await append_member(store, run, fast.lease_id, 1)
    clock.pass_s(61)
    assert not (await append_member(store, run, fast.lease_id, 2)).reason
    assert (await lease_tasks(store, run)).empty_reason == pb.EMPTY_REASON_NO_TASKS
    assert (await stats_of(store, run)).training.num_groups_unscored == 1


async def test_a_group_without_a_sampled_token_is_dropped_when_it_closes(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run, size=2)
    for member in range(2):
        await append_member(store, run, held.lease_id, member, versions={})
    counts = (await stats_of(store, run)).training
    assert counts.num_groups_dropped == {"no_trainable_token": 1}


async def test_an_evaluation_keeps_what_was_played_of_a_task(store: QueueStore, run: str) -> None:
    held = await begin(store, run, size=2, least=1, purpose=Purpose.EVALUATION)
    await append_member(store, run, held.lease_id, 0, versions={})
    for _ in range(2):
        await return_(store, run, held.lease_id, failed=True)
        held = await lease_task(store, run)
    await return_(store, run, held.lease_id, failed=True)
    (arrived,) = (await lease(store, run, Stage.EVALUATION)).leases
    assert len(arrived.group.trajectories) == 1


async def test_a_trajectory_is_no_second_member_of_its_group(store: QueueStore, run: str) -> None:
    held = await begin(store, run, size=2)
    first = bare_group("a", held.lease_id, size=1).group.trajectories[0]

    async def reason_for(member: int) -> str:
        item = pb.MemberItem(lease_id=held.lease_id, member=member, trajectory=first)
        request = pb.AppendMembersRequest(run=run, items=[item])
        (outcome,) = (await store.apply(request, pb.AppendMembersResponse)).outcomes
        return outcome.reason

    assert [await reason_for(member) for member in (0, 1)] == ["", "TRAJECTORY_REPEATED"]
    first.turns.add(rewards=[{"name": "r", "value": 1.0}])
    assert await reason_for(0) == "DIGEST_MISMATCH", "the reward is another"
