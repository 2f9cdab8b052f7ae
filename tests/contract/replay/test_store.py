"""What every store does with tasks and appends: the same facts on memory and Redis."""

from __future__ import annotations

import pytest
from dialoop.errors import Busy
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop_services.replay.store import (
    AppendStatus,
    CursorMove,
    EmptyReason,
    Outcome,
    State,
    Store,
    VersionSpan,
)

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    ack,
    clock,
    lease,
    lease_task,
    offer,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    bare_group,
    bare_task,
    play,
)


async def test_an_offer_is_idempotent_by_task_id(store: Store, run: str) -> None:
    tasks = [bare_task("a"), bare_task("b"), bare_task("a")]
    first = await store.offer_tasks(run, tasks, None)
    again = await store.offer_tasks(run, tasks, None)
    assert (first.num_new, first.num_known) == (2, 1)
    assert (again.num_new, again.num_known) == (0, 3)
    assert (await store.stats(run)).training.groups[State.OFFERED] == 2


async def test_a_moved_cursor_refuses_the_page(store: Store, run: str) -> None:
    moved = await store.offer_tasks(run, [bare_task("a")], CursorMove(expected="", next="p1"))
    assert moved.cursor == "p1"
    with pytest.raises(Busy) as caught:
        await store.offer_tasks(run, [bare_task("b")], CursorMove(expected="", next="p1"))
    assert caught.value.reason == "CURSOR_MOVED"
    stats = await store.stats(run)
    assert (stats.cursor, stats.training.groups[State.OFFERED]) == ("p1", 1)


async def test_an_empty_task_lease_says_why(store: Store, run: str) -> None:
    async def why() -> EmptyReason:
        found = await store.lease_tasks(run, worker="c", max_tasks=5, lease_s=60)
        return found.empty_reason

    assert await why() is EmptyReason.NO_TASKS
    await offer(store, run, "a", "b")
    assert await why() is EmptyReason.NO_POLICY
    await announce(store, run, credits=1)
    assert await why() is EmptyReason.NOT_EMPTY
    assert await why() is EmptyReason.NO_CREDITS


async def test_evaluation_tasks_come_first_and_need_neither_policy_nor_credit(
    store: Store, run: str
) -> None:
    await offer(store, run, "train")
    await offer(store, run, "eval", purpose=Purpose.EVALUATION)
    assert (await lease_task(store, run)).payload.startswith(b"eval")
    await offer(store, run, "eval2", purpose=Purpose.EVALUATION)
    await announce(store, run, credits=5)
    found = await store.lease_tasks(run, worker="c", max_tasks=5, lease_s=60)
    assert [held.payload[:-1] for held in found.leases] == [b"eval2", b"train"]
    assert found.credits == 4


async def test_tasks_are_leased_in_the_order_of_their_offer(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, *(f"t{i}" for i in range(12)))
    found = await store.lease_tasks(run, worker="c", max_tasks=12, lease_s=60)
    assert [held.payload[:-1].decode() for held in found.leases] == [f"t{i}" for i in range(12)]


async def test_credits_bound_what_is_outstanding_until_it_is_trained(
    store: Store, run: str
) -> None:
    await announce(store, run, credits=2)
    await offer(store, run, "a", "b", "c")
    found = await store.lease_tasks(run, worker="c", max_tasks=9, lease_s=60)
    assert (len(found.leases), found.credits) == (2, 0)
    for held in found.leases:
        group = bare_group(held.payload[:-1].decode(), held.lease_id)
        await store.append_groups(run, Stage.UNSCORED, [group])
        await score(store, run)
    trainer = await lease(store, run, Stage.SCORED, num=2, least=2)
    assert (await store.stats(run)).credits == 0
    ids = [held.lease_id for held in trainer.leases]
    one = PolicyVersion(lineage="main", number=1)
    credits = await store.advance_policy(
        run, one, trained_lease_ids=ids[:1], max_outstanding_groups=2
    )
    assert credits == 1
    stats = await store.stats(run)
    assert stats.training.groups[State.TRAINED] == stats.training.groups[State.TRAINING] == 1
    assert [await ack(store, run, lease_id) for lease_id in ids] == ["", ""]
    stats = await store.stats(run)
    assert (stats.credits, stats.training.groups[State.CONSUMED]) == (2, 2)


async def test_an_expired_task_lease_is_reissued_as_the_next_attempt(
    store: Store, run: str, clock: Clock
) -> None:
    await announce(store, run, credits=1)
    await offer(store, run, "a")
    first = await lease_task(store, run)
    clock.pass_s(61)
    second = await lease_task(store, run)
    assert (first.attempt, second.attempt) == (1, 2)
    late = await store.append_groups(run, Stage.UNSCORED, [bare_group("a", first.lease_id)])
    assert (late[0].status, late[0].reason) == (AppendStatus.REJECTED, "LEASE_LOST")
    group = bare_group("a", second.lease_id, attempt=2)
    (taken,) = await store.append_groups(run, Stage.UNSCORED, [group])
    (again,) = await store.append_groups(run, Stage.UNSCORED, [group])
    assert (taken.status, again.status) == (AppendStatus.APPENDED, AppendStatus.DUPLICATE)
    stats = await store.stats(run)
    assert (stats.num_rejected_appends, stats.num_duplicate_appends) == (1, 1)
    assert stats.training.num_trajectories_generated == 2


async def test_a_task_that_fails_too_often_is_dropped_under_its_reason(
    store: Store, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for attempt, dropped in ((1, 0), (2, 0), (3, 1)):
        held = await lease_task(store, run)
        assert held.attempt == attempt
        result = await return_(store, run, held.lease_id, failed=True, played=2)
        assert result == (1, dropped)
    stats = await store.stats(run)
    assert stats.training.groups_dropped == {"broken": 1}
    assert stats.training.trajectories_dropped == {"broken": 6}
    assert stats.training.num_trajectories_generated == 6


async def test_a_task_whose_collectors_all_vanish_is_dropped(
    store: Store, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for _ in range(3):
        await lease_task(store, run)
        clock.pass_s(61)
    assert (await store.stats(run)).training.groups_dropped == {"lease_expired": 1}


async def test_a_return_without_failure_never_uses_up_a_task(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    for attempt in range(1, 7):
        held = await lease_task(store, run)
        assert held.attempt == attempt
        assert await return_(store, run, held.lease_id) == (1, 0)
        assert await return_(store, run, held.lease_id, played=2) == (0, 0)


async def test_members_played_again_are_counted_once(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    group = bare_group("a", held.lease_id, num_discarded=3)
    await store.append_groups(run, Stage.UNSCORED, [group])
    await store.append_groups(run, Stage.UNSCORED, [group])
    counts = (await store.stats(run)).training
    assert counts.num_trajectories_generated == 5
    assert counts.trajectories_dropped == {"member_retried": 3}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task_id": "unknown"}, "UNKNOWN_TASK"),
        ({"size": 3}, "WRONG_SIZE"),
        ({"attempt": 2}, "LEASE_LOST"),
        ({"lease_id": "task/1/a"}, "LEASE_LOST"),
        ({"lease_id": "nonsense"}, "LEASE_LOST"),
        ({"versions": (VersionSpan(lineage="main", oldest=0, newest=1),)}, "FUTURE_VERSION"),
        ({"versions": (VersionSpan(lineage="other", oldest=0, newest=0),)}, "FUTURE_VERSION"),
    ],
)
async def test_a_group_that_does_not_fit_the_ledger_changes_nothing(
    store: Store, run: str, change: dict[str, object], reason: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    fields = {"task_id": "a", "lease_id": held.lease_id, **change}
    before = await store.stats(run)
    (result,) = await store.append_groups(run, Stage.UNSCORED, [bare_group(**fields)])  # type: ignore[arg-type]
    assert (result.status, result.reason) == (AppendStatus.REJECTED, reason)
    after = await store.stats(run)
    assert (after.training, after.num_rejected_appends) == (before.training, 1)
    good = bare_group("a", held.lease_id)
    assert (await store.append_groups(run, Stage.UNSCORED, [good]))[0].reason == ""


async def test_a_training_group_cannot_enter_the_evaluation_stage(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    held = await lease_task(store, run)
    (result,) = await store.append_groups(run, Stage.EVALUATION, [bare_group("a", held.lease_id)])
    assert result.reason == "UNKNOWN_TASK"


async def test_the_same_group_with_other_content_is_refused(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    (result,) = await store.append_groups(run, Stage.UNSCORED, [bare_group("a", "x", digest="e")])
    assert result.reason == "DIGEST_MISMATCH"


async def test_scoring_may_not_change_what_was_played(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    changed = bare_group("a", held.lease_id, digest="e")
    (result,) = await store.append_groups(run, Stage.SCORED, [changed])
    assert result.reason == "DIGEST_MISMATCH"


async def test_the_first_scored_copy_wins(store: Store, run: str, clock: Clock) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    (slow,) = (await lease(store, run, Stage.UNSCORED)).leases
    clock.pass_s(61)
    (fast,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert (slow.num_deliveries, fast.num_deliveries) == (1, 2)
    late = bare_group("a", slow.lease_id)
    assert (await store.append_groups(run, Stage.SCORED, [late]))[0].reason == "LEASE_LOST"
    good = bare_group("a", fast.lease_id)
    results = [(await store.append_groups(run, Stage.SCORED, [g]))[0] for g in (good, good, late)]
    assert [result.status for result in results] == [
        AppendStatus.APPENDED,
        AppendStatus.DUPLICATE,
        AppendStatus.DUPLICATE,
    ]
    assert await ack(store, run, slow.lease_id) == "LEASE_LOST"
    assert await ack(store, run, fast.lease_id) == ""
    assert await ack(store, run, fast.lease_id) == ""
    assert (await lease(store, run, Stage.SCORED, num=5)).leases[0].payload == good.payload


async def test_a_lease_that_ran_out_still_counts_while_nobody_took_over(
    store: Store, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    clock.pass_s(61)
    (result,) = await store.append_groups(run, Stage.SCORED, [bare_group("a", held.lease_id)])
    assert result.status is AppendStatus.APPENDED
    assert await ack(store, run, held.lease_id) == ""
    assert (await lease(store, run, Stage.UNSCORED)).empty_reason is EmptyReason.NO_GROUPS
    (trainer,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    assert await ack(store, run, trainer.lease_id) == ""
    assert (await lease(store, run, Stage.SCORED)).empty_reason is EmptyReason.NO_GROUPS


async def test_a_scorer_that_dies_after_its_append_leaves_nothing_to_redo(
    store: Store, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    await play(store, run)
    unacknowledged = await score(store, run, acknowledge=False)
    clock.pass_s(61)
    assert (await lease(store, run, Stage.UNSCORED)).empty_reason is EmptyReason.NO_GROUPS
    assert await ack(store, run, unacknowledged) == ""
    assert (await store.stats(run)).training.groups[State.SCORED] == 1


async def test_an_unscored_lease_is_consumed_only_by_a_scored_copy(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b")
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    assert await ack(store, run, held.lease_id) == "NOT_SCORED"
    assert await ack(store, run, held.lease_id, Outcome.DROPPED, "uniform_reward") == ""
    assert await ack(store, run, held.lease_id, Outcome.DROPPED, "uniform_reward") == ""
    assert (await store.stats(run)).training.groups_dropped == {"uniform_reward": 1}
    late = bare_group("a", held.lease_id)
    assert (await store.append_groups(run, Stage.SCORED, [late]))[0].reason == "LEASE_LOST"
    await play(store, run)
    done = await score(store, run)
    assert await ack(store, run, done, Outcome.DROPPED, "oversize") == "ALREADY_SCORED"
