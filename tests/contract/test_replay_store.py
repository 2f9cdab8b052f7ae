"""What every store of the queue does: the same facts on memory and on Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from dialoop.errors import Busy, CapacityExhausted, NotFound, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage

from services.replay.memory_store import MemoryStore
from services.replay.redis_store import RedisStore
from services.replay.store import (
    Acknowledgement,
    AppendStatus,
    CursorMove,
    EmptyReason,
    GivenBack,
    GroupLeases,
    GroupQuery,
    Limits,
    Outcome,
    State,
    Store,
    TaskLease,
    VersionSpan,
)
from tests.redis_server import new_run, redis_url  # noqa: F401
from tests.replay_samples import (
    Clock,
    announce,
    assert_adds_up,
    bare_group,
    bare_task,
    play,
)

LIMITS = Limits(max_attempts=3, max_deliveries=3, lease_s=60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(LIMITS, clock=clock)
        return
    made = RedisStore(request.getfixturevalue("redis_url"), LIMITS, clock=clock)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def run(store: Store) -> AsyncIterator[str]:
    name = new_run()
    yield name
    assert_adds_up(await store.stats(name))
    await store.purge(name)


async def offer(store: Store, run: str, *task_ids: str, purpose: Purpose = Purpose.TRAINING) -> int:
    tasks = [bare_task(task_id, purpose=purpose) for task_id in task_ids]
    return (await store.offer_tasks(run, tasks, None)).num_new


async def lease_task(store: Store, run: str) -> TaskLease:
    (lease,) = (await store.lease_tasks(run, worker="c", max_tasks=1, lease_s=60)).leases
    return lease


async def lease(
    store: Store,
    run: str,
    stage: Stage,
    *,
    num: int = 1,
    least: int = 1,
    max_staleness: int | None = None,
    prefix: str = "",
) -> GroupLeases:
    query = GroupQuery(
        stage=stage,
        worker="w",
        max_groups=num,
        min_groups=least,
        lease_s=60,
        max_staleness=max_staleness,
        task_id_prefix=prefix,
    )
    return await store.lease_groups(run, query)


async def ack(
    store: Store, run: str, lease_id: str, outcome: Outcome = Outcome.CONSUMED, reason: str = ""
) -> str:
    item = Acknowledgement(lease_id=lease_id, outcome=outcome, reason=reason)
    (why_not,) = await store.acknowledge(run, [item])
    return why_not


async def return_(
    store: Store, run: str, lease_id: str, *, failed: bool = False, played: int = 0
) -> tuple[int, int]:
    item = GivenBack(lease_id=lease_id, reason="broken", num_trajectories=played, failed=failed)
    returned = await store.give_back(run, [item])
    return returned.num_returned, returned.num_dropped


async def score(store: Store, run: str, *, acknowledge: bool = True) -> str:
    """Score the oldest unscored group; its unscored lease."""
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    task_id = held.lease_id.split("/", 2)[2]
    attempt = int(held.payload[:-2].decode().rpartition("#")[2])
    group = bare_group(task_id, held.lease_id, attempt=attempt)
    (result,) = await store.append_groups(run, Stage.SCORED, [group])
    assert result.status is AppendStatus.APPENDED, result
    if acknowledge:
        assert await ack(store, run, held.lease_id) == ""
    return held.lease_id


async def ready_to_train(store: Store, run: str, *task_ids: str) -> None:
    await announce(store, run)
    await offer(store, run, *task_ids)
    for _ in task_ids:
        await play(store, run)
        await score(store, run)


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


async def test_a_lease_gives_distinct_groups_in_order(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b", "c")
    first = await lease(store, run, Stage.SCORED, num=2)
    second = await lease(store, run, Stage.SCORED, num=2)
    assert [held.payload for held in first.leases] == [b"a#1\x00\xff", b"b#1\x00\xff"]
    assert [held.payload for held in second.leases] == [b"c#1\x00\xff"]
    assert (first.num_ready, second.num_ready) == (1, 0)


async def test_below_the_minimum_nothing_is_leased(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    found = await lease(store, run, Stage.SCORED, num=4, least=3)
    assert (found.leases, found.empty_reason, found.num_ready) == ((), EmptyReason.TOO_FEW, 2)
    assert len((await lease(store, run, Stage.SCORED, num=4, least=2)).leases) == 2
    assert (await lease(store, run, Stage.SCORED)).empty_reason is EmptyReason.NO_GROUPS


async def test_no_more_is_leased_than_fits_one_message(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b", "c")
    query = GroupQuery(stage=Stage.SCORED, worker="w", max_groups=3, lease_s=60, max_bytes=10)
    with pytest.raises(CapacityExhausted) as caught:
        await store.lease_groups(run, replace(query, min_groups=3))
    assert caught.value.reason == "TOO_LARGE"
    assert len((await store.lease_groups(run, query)).leases) == 2
    assert len((await store.lease_groups(run, replace(query, max_bytes=1))).leases) == 1


async def test_stale_groups_are_dropped_and_refunded_instead_of_leased(
    store: Store, run: str
) -> None:
    await announce(store, run, 0, credits=2)
    await offer(store, run, "old", "new")
    await play(store, run)
    await score(store, run)
    await announce(store, run, 3, credits=2)
    held = await lease_task(store, run)
    fresh = (VersionSpan(lineage="main", oldest=2, newest=3),)
    group = bare_group("new", held.lease_id, versions=fresh)
    await store.append_groups(run, Stage.UNSCORED, [group])
    await score(store, run)
    found = await lease(store, run, Stage.SCORED, num=5, least=2, max_staleness=2)
    assert (found.empty_reason, found.num_ready) == (EmptyReason.TOO_FEW, 1)
    stats = await store.stats(run)
    assert (stats.training.groups_dropped, stats.credits) == ({"stale": 1}, 1)
    (kept,) = (await lease(store, run, Stage.SCORED, num=5, max_staleness=1)).leases
    assert kept.payload == b"new#1\x00\xff"


async def test_a_group_of_a_lineage_given_up_is_stale(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a")
    await announce(store, run, 0, lineage="second")
    found = await lease(store, run, Stage.SCORED, max_staleness=100)
    assert found.empty_reason is EmptyReason.NO_GROUPS
    assert (await store.stats(run)).training.groups_dropped == {"stale": 1}


async def test_without_a_bound_nothing_is_stale(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a")
    await announce(store, run, 50)
    assert len((await lease(store, run, Stage.SCORED)).leases) == 1


async def test_a_group_delivered_too_often_is_a_dead_letter_that_can_come_back(
    store: Store, run: str, clock: Clock
) -> None:
    await announce(store, run, credits=1)
    await offer(store, run, "a")
    await play(store, run)
    await score(store, run)
    for delivery in (1, 2, 3):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert held.num_deliveries == delivery
        clock.pass_s(61)
    stats = await store.stats(run)
    assert (stats.num_dead_letters, stats.num_redelivered, stats.credits) == (1, 2, 1)
    assert stats.training.groups_dropped == {"dead_letter": 1}
    assert stats.training.trajectories_dropped == {"dead_letter": 2}
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    (letter,) = await store.dead_letters(run, 5)
    assert (letter.group_id, letter.stage) == ("a#1", Stage.SCORED)
    assert (letter.reason, letter.num_deliveries) == ("lease_expired", 3)
    with pytest.raises(NotFound) as caught:
        await store.requeue(run, ["a#1", "b#1"])
    assert caught.value.reason == "GROUP_NOT_FOUND"
    assert await store.requeue(run, ["a#1"]) == 1
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    assert (held.num_deliveries, held.payload) == (1, letter.payload)
    assert await ack(store, run, held.lease_id) == ""
    stats = await store.stats(run)
    assert (stats.num_dead_letters, stats.training.groups_dropped) == (0, {})
    assert stats.training.num_trajectories_consumed == 2


async def test_only_failed_returns_lead_to_the_dead_letters(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a")
    for _ in range(5):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert await return_(store, run, held.lease_id) == (1, 0)
        assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    for dropped in (0, 0, 1):
        (held,) = (await lease(store, run, Stage.SCORED)).leases
        assert await return_(store, run, held.lease_id, failed=True) == (1, dropped)
        assert await return_(store, run, held.lease_id, failed=True) == (0, 0)
    assert (await store.dead_letters(run, 5))[0].reason == "broken"


async def test_an_acknowledgement_is_idempotent_and_final(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    first, second = (await lease(store, run, Stage.SCORED, num=2)).leases
    assert await ack(store, run, first.lease_id) == ""
    assert await ack(store, run, first.lease_id) == ""
    assert await ack(store, run, first.lease_id, Outcome.DROPPED, "late") == "ALREADY_CONSUMED"
    assert await ack(store, run, second.lease_id, Outcome.DROPPED, "oversize") == ""
    assert await ack(store, run, second.lease_id) == "ALREADY_DROPPED"
    assert await ack(store, run, "scored/1/a") == "LEASE_LOST"
    assert await ack(store, run, "nonsense") == "LEASE_LOST"
    counts = (await store.stats(run)).training
    assert (counts.num_trajectories_consumed, counts.trajectories_dropped) == (2, {"oversize": 2})
    again = bare_group("a", "task/1/a")
    (result,) = await store.append_groups(run, Stage.UNSCORED, [again])
    assert result.status is AppendStatus.DUPLICATE


async def test_a_group_taken_over_is_not_acknowledged_by_the_first_holder(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (slow,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    (fast,) = (await lease(store, run, Stage.SCORED)).leases
    assert await ack(store, run, slow.lease_id) == "LEASE_LOST"
    assert await ack(store, run, fast.lease_id) == ""


async def test_extending_keeps_a_lease_and_names_the_lost_ones(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    await offer(store, run, "b", "c")
    kept, lost = await lease_task(store, run), await lease_task(store, run)
    (group,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(50)
    assert await store.extend(run, [kept.lease_id, group.lease_id, "x/1/y"], 60) == ("x/1/y",)
    clock.pass_s(50)
    stats = await store.stats(run)
    assert stats.training.groups[State.LEASED] == stats.training.groups[State.TRAINING] == 1
    assert await store.extend(run, [lost.lease_id], 60) == (lost.lease_id,)
    clock.pass_s(50)
    assert (await store.stats(run)).training.groups[State.SCORED] == 1
    assert await store.extend(run, [group.lease_id], 60) == ()
    assert (await store.stats(run)).training.groups[State.TRAINING] == 1


async def test_a_trained_group_is_redelivered_when_its_trainer_vanishes(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    one = PolicyVersion(lineage="main", number=1)
    for _ in range(2):
        await store.advance_policy(
            run, one, trained_lease_ids=[held.lease_id], max_outstanding_groups=4
        )
    assert (await store.stats(run)).training.groups[State.TRAINED] == 1
    clock.pass_s(61)
    (again,) = (await lease(store, run, Stage.SCORED)).leases
    assert again.num_deliveries == 2
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"


async def test_a_late_trained_lease_is_taken_back_from_the_queue(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    one = PolicyVersion(lineage="main", number=1)
    await store.advance_policy(
        run, one, trained_lease_ids=[held.lease_id], max_outstanding_groups=4
    )
    assert (await lease(store, run, Stage.SCORED)).empty_reason is EmptyReason.NO_GROUPS
    assert await ack(store, run, held.lease_id) == ""


async def test_a_policy_only_moves_forward_within_its_lineage(store: Store, run: str) -> None:
    assert await announce(store, run, 2, credits=3) == 3
    assert await announce(store, run, 2, credits=4) == 4
    for lineage, number in (("main", 1), ("main", 0)):
        with pytest.raises(PreconditionFailed) as caught:
            await announce(store, run, number, lineage=lineage)
        assert caught.value.reason == "VERSION_NOT_NEWER"
    assert await announce(store, run, 0, lineage="second", credits=5) == 5
    with pytest.raises(PreconditionFailed):
        await announce(store, run, 9, lineage="main")
    version = (await store.stats(run)).policy_version
    assert version == PolicyVersion(lineage="second", number=0)


async def test_evaluation_groups_go_to_who_asks_for_their_prefix(store: Store, run: str) -> None:
    await offer(store, run, "e1/a", "e2/a", "e1/b", purpose=Purpose.EVALUATION)
    for _ in range(3):
        await play(store, run, stage=Stage.EVALUATION)
    found = await lease(store, run, Stage.EVALUATION, num=5, prefix="e1/")
    assert [held.payload[:4] for held in found.leases] == [b"e1/a", b"e1/b"]
    assert (await lease(store, run, Stage.SCORED)).empty_reason is EmptyReason.NO_GROUPS
    for held in found.leases:
        assert await ack(store, run, held.lease_id) == ""
    counts = (await store.stats(run)).evaluation
    assert (counts.groups[State.CONSUMED], counts.groups[State.SCORED]) == (2, 1)
    assert (counts.num_trajectories_consumed, counts.num_trajectories_live) == (4, 2)


async def test_peeking_changes_nothing(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    before = await store.stats(run)
    assert await store.peek(run, Stage.SCORED, 1) == (b"a#1\x00\xff",)
    assert await store.peek(run, Stage.UNSCORED, 5) == ()
    assert await store.stats(run) == before


async def test_a_purged_run_is_forgotten_and_its_leases_are_lost(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    other = new_run()
    await offer(store, other, "kept")
    await store.purge(run)
    assert (await store.stats(run)).training.groups[State.CONSUMED] == 0
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    assert (await store.stats(other)).training.groups[State.OFFERED] == 1
    await store.purge(other)


async def test_many_groups_in_one_call_each_get_their_own_answer(store: Store, run: str) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b", "c")
    leases = (await store.lease_tasks(run, worker="c", max_tasks=3, lease_s=60)).leases
    groups = [bare_group(held.payload[:-1].decode(), held.lease_id) for held in leases]
    results = await store.append_groups(
        run, Stage.UNSCORED, [groups[0], bare_group("x", "task/1/x"), groups[1], groups[0]]
    )
    assert [(r.status.name, r.reason) for r in results] == [
        ("APPENDED", ""),
        ("REJECTED", "UNKNOWN_TASK"),
        ("APPENDED", ""),
        ("DUPLICATE", ""),
    ]
