"""What every store does with leases of groups: the same facts on memory and Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dialoop.errors import CapacityExhausted, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop_services.replay.store import (
    AppendStatus,
    EmptyReason,
    GroupQuery,
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
    ready_to_train,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    bare_group,
    play,
)


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


async def test_a_worker_is_told_what_it_holds_and_reopens_it(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a", "b", "c", "d")
    first = (await lease(store, run, Stage.SCORED, num=2)).leases
    await lease(store, run, Stage.SCORED, worker="another")
    ids = [held.lease_id for held in first]
    assert await store.leases_of(run, Stage.SCORED, "w") == tuple(ids)
    assert await store.leases_of(run, Stage.UNSCORED, "w") == ()
    clock.pass_s(50)
    again = await store.reopen(run, ids[::-1], lease_s=60)
    assert (again.leases, again.lost) == (first[::-1], ())
    clock.pass_s(50)
    assert await store.leases_of(run, Stage.SCORED, "w") == tuple(ids)
    await return_(store, run, ids[0])
    assert await store.leases_of(run, Stage.SCORED, "w") == tuple(ids[1:])
    assert await ack(store, run, ids[1]) == ""
    assert await store.leases_of(run, Stage.SCORED, "w") == ()


async def test_leases_are_reopened_together_or_not_at_all(
    store: Store, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a", "b")
    kept, lost = (held.lease_id for held in (await lease(store, run, Stage.SCORED, num=2)).leases)
    await return_(store, run, lost)
    found = await store.reopen(run, [kept, lost, "x/1/y"], lease_s=60)
    assert (found.leases, found.lost) == ((), (lost, "x/1/y"))
    with pytest.raises(CapacityExhausted) as caught:
        await store.reopen(run, [kept], lease_s=60, max_bytes=1)
    assert caught.value.reason == "TOO_LARGE"
    clock.pass_s(61)
    assert (await store.stats(run)).training.groups[State.SCORED] == 2
    # It ran out, but nobody took it: its holder may go on.
    (again,) = (await store.reopen(run, [kept], lease_s=60)).leases
    assert (again.lease_id, again.payload) == (kept, b"a#1\x00\xff")
    assert (await store.stats(run)).training.groups[State.TRAINING] == 1


async def test_what_is_returned_is_leased_before_anything_newer(store: Store, run: str) -> None:
    await ready_to_train(store, run, "a", "b", "c")
    taken = (await lease(store, run, Stage.SCORED, num=2)).leases
    for held in reversed(taken):
        await return_(store, run, held.lease_id, failed=True)
    again = await lease(store, run, Stage.SCORED, num=3)
    assert [h.payload for h in again.leases] == [b"a#1\x00\xff", b"b#1\x00\xff", b"c#1\x00\xff"]


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
