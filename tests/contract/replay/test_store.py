"""What every store does with tasks and appends: the same facts on memory and Redis."""

from __future__ import annotations

import pytest
from dialoop.errors import Busy
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    ack,
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
    append,
    bare_group,
    lease_tasks,
    make_task,
    offer,
    offer_tasks,
    play,
    stats_of,
)


async def test_an_offer_is_idempotent_by_task_id(store: QueueStore, run: str) -> None:
    tasks = [make_task("a"), make_task("b"), make_task("a")]
    first = await offer_tasks(store, run, tasks)
    again = await offer_tasks(store, run, tasks)
    assert (first.num_new, first.num_known) == (2, 1)
    assert (again.num_new, again.num_known) == (0, 3)
    assert (await stats_of(store, run)).training.num_tasks_offered == 2


async def test_a_moved_cursor_refuses_the_page(store: QueueStore, run: str) -> None:
    moved = await offer_tasks(store, run, [make_task("a")], "", "p1")
    assert moved.cursor == "p1"
    with pytest.raises(Busy) as caught:
        await offer_tasks(store, run, [make_task("b")], "", "p1")
    assert caught.value.reason == "CURSOR_MOVED"
    stats = await stats_of(store, run)
    assert (stats.cursor, stats.training.num_tasks_offered) == ("p1", 1)


async def test_an_empty_task_lease_says_why(store: QueueStore, run: str) -> None:
    async def why() -> int:
        answer = await lease_tasks(store, run, 5)
        return answer.empty_reason

    assert await why() == pb.EMPTY_REASON_NO_TASKS
    await offer(store, run, "a", "b")
    assert await why() == pb.EMPTY_REASON_NO_POLICY
    await announce(store, run, credits=1)
    assert await why() == pb.EMPTY_REASON_NOT_EMPTY
    assert await why() == pb.EMPTY_REASON_NO_CREDITS


async def test_evaluation_tasks_come_first_and_need_neither_policy_nor_credit(
    store: QueueStore, run: str
) -> None:
    await offer(store, run, "train")
    await offer(store, run, "eval", purpose=Purpose.EVALUATION)
    assert (await lease_task(store, run)).task.task_id == "eval"
    await offer(store, run, "eval2", purpose=Purpose.EVALUATION)
    await announce(store, run, credits=5)
    answer = await lease_tasks(store, run, 5)
    assert [held.task.task_id for held in answer.leases] == ["eval2", "train"]
    assert answer.credits == 4


async def test_tasks_are_leased_in_the_order_of_their_offer(store: QueueStore, run: str) -> None:
    await announce(store, run)
    await offer(store, run, *(f"t{i}" for i in range(12)))
    answer = await lease_tasks(store, run, 12)
    assert [held.task.task_id for held in answer.leases] == [f"t{i}" for i in range(12)]


async def test_credits_bound_what_is_outstanding_until_it_is_trained(
    store: QueueStore, run: str
) -> None:
    await announce(store, run, credits=2)
    await offer(store, run, "a", "b", "c")
    answer = await lease_tasks(store, run, 9)
    assert (len(answer.leases), answer.credits) == (2, 0)
    for held in answer.leases:
        group = bare_group(held.task.task_id, held.lease_id)
        await append(store, run, Stage.UNSCORED, group)
        await score(store, run)
    trainer = await lease(store, run, Stage.SCORED, num=2, least=2)
    assert (await stats_of(store, run)).credits == 0
    assert await announce(store, run, 0, credits=1) == 0, "never negative"
    ids = [held.lease_id for held in trainer.leases]
    assert await announce(store, run, 1, ids[0], credits=2) == 1
    stats = await stats_of(store, run)
    assert stats.training.num_groups_trained == stats.training.num_groups_training == 1
    assert [await ack(store, run, lease_id) for lease_id in ids] == ["", ""]
    stats = await stats_of(store, run)
    assert (stats.credits, stats.training.num_groups_consumed) == (2, 2)


async def test_an_expired_task_lease_is_reissued_as_the_next_attempt(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run, credits=1)
    await offer(store, run, "a")
    first = await lease_task(store, run)
    clock.pass_s(61)
    second = await lease_task(store, run)
    assert (first.attempt, second.attempt) == (1, 2)
    late = await append(store, run, Stage.UNSCORED, bare_group("a", first.lease_id))
    assert (late[0].status, late[0].reason) == (pb.APPEND_STATUS_REJECTED, "LEASE_LOST")
    group = bare_group("a", second.lease_id)
    (taken,) = await append(store, run, Stage.UNSCORED, group)
    (again,) = await append(store, run, Stage.UNSCORED, group)
    assert (taken.status, again.status) == (pb.APPEND_STATUS_APPENDED, pb.APPEND_STATUS_DUPLICATE)
    stats = await stats_of(store, run)
    assert (stats.num_rejected_appends, stats.num_duplicate_appends) == (2, 2), "by member"
    assert stats.training.num_trajectories_generated == 2


async def test_a_task_that_fails_too_often_is_dropped_under_its_reason(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for attempt, dropped in ((1, 0), (2, 0), (3, 1)):
        held = await lease_task(store, run)
        assert held.attempt == attempt
        result = await return_(store, run, held.lease_id, failed=True, played=2)
        assert result == (1, dropped)
    stats = await stats_of(store, run)
    assert stats.training.num_groups_dropped == {"broken": 1}
    assert stats.training.num_trajectories_dropped == {"broken": 6}
    assert stats.training.num_trajectories_generated == 6


async def test_a_task_whose_collectors_all_vanish_is_dropped(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for _ in range(3):
        await lease_task(store, run)
        clock.pass_s(61)
    assert (await stats_of(store, run)).training.num_groups_dropped == {"lease_expired": 1}


async def test_a_return_without_failure_never_uses_up_a_task(store: QueueStore, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for attempt in range(1, 7):
        held = await lease_task(store, run)
        assert held.attempt == attempt
        assert await return_(store, run, held.lease_id) == (1, 0)
        assert await return_(store, run, held.lease_id, played=2) == (0, 0)


async def test_members_played_again_are_counted_once(store: QueueStore, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    group = bare_group("a", held.lease_id, num_discarded=3)
    await append(store, run, Stage.UNSCORED, group)
    await append(store, run, Stage.UNSCORED, group)
    counts = (await stats_of(store, run)).training
    assert counts.num_trajectories_generated == 5
    assert counts.num_trajectories_dropped == {"member_retried": 3}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_id": "task/1/unknown"}, "UNKNOWN_TASK"),
        ({"lease_id": "task/1/a"}, "LEASE_LOST"),
        ({"lease_id": "unscored/1/a"}, "LEASE_LOST"),
        ({"lease_id": "nonsense"}, "LEASE_LOST"),
        ({"versions": {"main": (0, 1)}}, "FUTURE_VERSION"),
        ({"versions": {"other": (0, 0)}}, "FUTURE_VERSION"),
    ],
)
async def test_a_group_that_does_not_fit_the_ledger_changes_nothing(
    store: QueueStore, run: str, change: dict[str, object], reason: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    fields = {"task_id": "a", "lease_id": held.lease_id, **change}
    before = await stats_of(store, run)
    (result,) = await append(store, run, Stage.UNSCORED, bare_group(**fields))  # type: ignore[arg-type]
    assert (result.status, result.reason) == (pb.APPEND_STATUS_REJECTED, reason)
    after = await stats_of(store, run)
    assert (after.training, after.num_rejected_appends) == (before.training, 2)
    good = bare_group("a", held.lease_id)
    assert (await append(store, run, Stage.UNSCORED, good))[0].reason == ""


async def test_the_same_group_with_other_content_is_refused(store: QueueStore, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    await append(store, run, Stage.UNSCORED, bare_group("a", held.lease_id))
    other = bare_group("a", held.lease_id, content="e")
    (result,) = await append(store, run, Stage.UNSCORED, other)
    assert result.reason == "DIGEST_MISMATCH"


async def test_scoring_may_not_change_what_was_played(store: QueueStore, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    changed = bare_group("a", held.lease_id, content="e")
    (result,) = await append(store, run, Stage.SCORED, changed)
    assert result.reason == "DIGEST_MISMATCH"


async def test_the_first_scored_copy_wins(store: QueueStore, run: str, clock: Clock) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    (slow,) = (await lease(store, run, Stage.UNSCORED)).leases
    clock.pass_s(61)
    (fast,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert (slow.num_deliveries, fast.num_deliveries) == (1, 2)
    late = bare_group("a", slow.lease_id)
    assert (await append(store, run, Stage.SCORED, late))[0].reason == "LEASE_LOST"
    good = bare_group("a", fast.lease_id)
    results = [(await append(store, run, Stage.SCORED, g))[0] for g in (good, good, late)]
    assert [result.status for result in results] == [
        pb.APPEND_STATUS_APPENDED,
        pb.APPEND_STATUS_DUPLICATE,
        pb.APPEND_STATUS_DUPLICATE,
    ]
    assert await ack(store, run, slow.lease_id) == "LEASE_LOST"
    assert await ack(store, run, fast.lease_id) == ""
    assert await ack(store, run, fast.lease_id) == ""
    assert (await lease(store, run, Stage.SCORED, num=5)).leases[0].group == good.group


async def test_a_lease_that_ran_out_still_counts_while_nobody_took_over(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    clock.pass_s(61)
    (result,) = await append(store, run, Stage.SCORED, bare_group("a", held.lease_id))
    assert result.status == pb.APPEND_STATUS_APPENDED
    assert await ack(store, run, held.lease_id) == ""
    assert (await lease(store, run, Stage.UNSCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS
    (trainer,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    assert await ack(store, run, trainer.lease_id) == ""
    assert (await lease(store, run, Stage.SCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS


async def test_a_scorer_that_dies_after_its_append_leaves_nothing_to_score(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    unacknowledged = await score(store, run, acknowledge=False)
    clock.pass_s(61)
    assert (await lease(store, run, Stage.UNSCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS
    assert await ack(store, run, unacknowledged) == ""
    assert (await stats_of(store, run)).training.num_groups_scored == 1


async def test_an_unscored_lease_is_consumed_only_by_a_scored_copy(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert await ack(store, run, held.lease_id) == "NOT_SCORED"
    assert await ack(store, run, held.lease_id, "uniform_reward") == ""
    assert await ack(store, run, held.lease_id, "uniform_reward") == ""
    assert (await stats_of(store, run)).training.num_groups_dropped == {"uniform_reward": 1}
    late = bare_group("a", held.lease_id)
    assert (await append(store, run, Stage.SCORED, late))[0].reason == "LEASE_LOST"
    await play(store, run)
    done = await score(store, run)
    assert await ack(store, run, done, "oversize") == "ALREADY_SCORED"
