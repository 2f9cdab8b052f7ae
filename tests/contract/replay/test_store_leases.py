"""What every store does with leases of groups: the same facts on memory and Redis."""

from __future__ import annotations

import pytest
from dialoop.errors import PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    LIMITS,
    NUM_THAT_FIT,
    ack,
    clock,
    extend,
    lease,
    lease_task,
    list_leases,
    names_of,
    peek,
    ready_to_train,
    reopen,
    return_,
    run,
    score,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append,
    append_member,
    bare_group,
    counts_of,
    lease_tasks,
    make_task,
    offer,
    offer_tasks,
    play,
    purge,
    set_values,
    stats_of,
)
from tests.support.samples.staleness_samples import CASES


async def test_a_lease_gives_distinct_groups_in_order(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a", "b", "c")
    first = await lease(store, run, Stage.SCORED, num=2)
    second = await lease(store, run, Stage.SCORED, num=2)
    assert names_of(first.leases) == ["a", "b"]
    assert names_of(second.leases) == ["c"]
    assert (first.num_ready, second.num_ready) == (1, 0)


async def test_the_position_up_to_which_all_tasks_have_ended(store: QueueStore, run: str) -> None:
    """A queue that loses its state goes on from there, and leaves out no task."""

    async def settled() -> str:
        stats = await stats_of(store, run)
        assert stats.cursor == "0:4"
        return stats.settled_cursor

    await announce(store, run)
    for names, cursors in (("ab", ("", "0:2")), ("c", ("0:2", "0:3")), ("", ("0:3", "0:4"))):
        await offer_tasks(store, run, [make_task(name) for name in names], *cursors)
    assert await settled() == ""
    await ready_to_train(store, run, "a", "b", "c")
    leases = (await lease(store, run, Stage.SCORED, num=3)).leases
    by_name = {held.group.group_id: held.lease_id for held in leases}
    assert await ack(store, run, by_name["c"]) == ""
    assert await ack(store, run, by_name["a"]) == ""
    assert await settled() == ""
    assert await ack(store, run, by_name["b"], "stale") == ""
    assert await settled() == "0:4"
    await offer_tasks(store, run, [make_task("c"), make_task("d")], "0:4", "0:4")
    await offer_tasks(store, run, [make_task("d"), make_task("e")], "0:4", "0:6")
    stats = await stats_of(store, run)
    assert (stats.cursor, stats.settled_cursor) == ("0:6", "0:4")


async def test_below_the_minimum_nothing_is_leased(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    answer = await lease(store, run, Stage.SCORED, num=4, least=3)
    assert (list(answer.leases), answer.empty_reason, answer.num_ready) == (
        [],
        pb.EMPTY_REASON_TOO_FEW,
        2,
    )
    assert len((await lease(store, run, Stage.SCORED, num=4, least=2)).leases) == 2
    assert (await lease(store, run, Stage.SCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS


async def test_no_more_is_leased_than_fits_one_message(store: QueueStore, run: str) -> None:
    names = "abcdefg"
    assert len(names) == NUM_THAT_FIT + 1
    await ready_to_train(store, run, *names)
    first = await lease(store, run, Stage.SCORED, num=len(names), least=len(names))
    assert (len(first.leases), first.is_cut) == (NUM_THAT_FIT, True)
    rest = await lease(store, run, Stage.SCORED, num=len(names))
    assert (len(rest.leases), rest.is_cut) == (1, False)
    ids = [held.lease_id for held in (*first.leases, *rest.leases)]
    again = await reopen(store, run, *ids)
    assert ([held.lease_id for held in again.leases], again.is_cut) == (ids[:NUM_THAT_FIT], True)


async def test_a_member_that_makes_its_group_too_large_is_refused(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "large")
    held = await lease_task(store, run)
    content = "x" * (LIMITS.max_lease_bytes // 2)
    outcomes = [
        await append_member(store, run, held.lease_id, member, content=content)
        for member in range(2)
    ]
    assert [outcome.reason for outcome in outcomes] == ["", "TOO_LARGE"]


async def test_a_group_that_scoring_made_too_large_is_leased_alone(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "large", "small")
    await play(store, run)
    await play(store, run)
    (held,) = (await lease(store, run, Stage.UNSCORED)).leases
    set_values(
        held.group.trajectories[0].sequences[0], "ref_logprobs", [0.5] * LIMITS.max_lease_bytes
    )
    item = pb.AppendItem(group=held.group, lease_id=held.lease_id)
    assert (await append(store, run, Stage.SCORED, item))[0].reason == ""
    await score(store, run)
    both = await lease(store, run, Stage.SCORED, num=2, least=2)
    assert (names_of(both.leases), both.is_cut) == (["large"], True)


async def test_stale_groups_are_dropped_and_refunded_instead_of_leased(
    store: QueueStore, run: str
) -> None:
    await announce(store, run, 0, credits=2)
    await offer(store, run, "old", "new")
    await play(store, run)
    await score(store, run)
    await announce(store, run, 3, credits=2)
    held = await lease_task(store, run)
    group = bare_group("new", held.lease_id, versions={"main": (2, 3)})
    await append(store, run, Stage.UNSCORED, group)
    await score(store, run)
    answer = await lease(store, run, Stage.SCORED, num=5, least=2, max_staleness=2)
    assert (answer.empty_reason, answer.num_ready) == (pb.EMPTY_REASON_TOO_FEW, 1)
    stats = await stats_of(store, run)
    assert (stats.training.num_groups_dropped, stats.credits) == ({"stale": 1}, 1)
    (kept,) = (await lease(store, run, Stage.SCORED, num=5, max_staleness=1)).leases
    assert kept.group == group.group


@pytest.mark.parametrize(("versions", "current", "max_staleness", "expected"), CASES)
async def test_staleness_follows_the_table(
    store: QueueStore,
    run: str,
    versions: tuple[PolicyVersion, ...],
    current: PolicyVersion,
    max_staleness: int | None,
    expected: bool,
) -> None:
    await offer(store, run, "a")
    by_lineage: dict[str, list[int]] = {}
    for version in versions:
        by_lineage.setdefault(version.lineage, []).append(version.number)
    for lineage in by_lineage.keys() - {current.lineage}:
        await announce(store, run, max(by_lineage[lineage]), lineage=lineage)
    await announce(store, run, current.number, lineage=current.lineage)
    held = await lease_task(store, run)
    spans = {lineage: (min(numbers), max(numbers)) for lineage, numbers in by_lineage.items()}
    group = bare_group("a", held.lease_id, versions=spans)
    (outcome,) = await append(store, run, Stage.UNSCORED, group)
    assert outcome.status == pb.APPEND_STATUS_APPENDED
    await score(store, run)
    answer = await lease(store, run, Stage.SCORED, max_staleness=max_staleness)
    assert bool(answer.leases) is not expected
    dropped = {"stale": 1} if expected else {}
    assert (await stats_of(store, run)).training.num_groups_dropped == dropped


async def test_a_group_of_a_lineage_given_up_is_stale(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a")
    await announce(store, run, 0, lineage="second")
    answer = await lease(store, run, Stage.SCORED, max_staleness=100)
    assert answer.empty_reason == pb.EMPTY_REASON_NO_GROUPS
    assert (await stats_of(store, run)).training.num_groups_dropped == {"stale": 1}


async def test_without_a_bound_nothing_is_stale(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a")
    await announce(store, run, 50)
    assert len((await lease(store, run, Stage.SCORED)).leases) == 1


async def test_an_acknowledgement_is_idempotent_and_final(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    first, second = (await lease(store, run, Stage.SCORED, num=2)).leases
    assert await ack(store, run, first.lease_id) == ""
    assert await ack(store, run, first.lease_id) == ""
    assert await ack(store, run, first.lease_id, "late") == "ALREADY_CONSUMED"
    assert await ack(store, run, second.lease_id, "oversize") == ""
    assert await ack(store, run, second.lease_id) == "ALREADY_DROPPED"
    assert await ack(store, run, "scored/1/a") == "LEASE_LOST"
    assert await ack(store, run, "nonsense") == "LEASE_LOST"
    counts = (await stats_of(store, run)).training
    assert (counts.num_trajectories_consumed, counts.num_trajectories_dropped) == (
        2,
        {"oversize": 2},
    )
    again = bare_group("a", "task/1/a")
    (result,) = await append(store, run, Stage.UNSCORED, again)
    assert result.status == pb.APPEND_STATUS_DUPLICATE


async def test_a_group_taken_over_is_not_acknowledged_by_the_first_holder(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (slow,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    (fast,) = (await lease(store, run, Stage.SCORED)).leases
    assert await ack(store, run, slow.lease_id) == "LEASE_LOST"
    assert await ack(store, run, fast.lease_id) == ""


async def test_extending_keeps_a_lease_and_names_the_lost_ones(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    await offer(store, run, "b", "c")
    kept, lost = await lease_task(store, run), await lease_task(store, run)
    (group,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(50)
    assert await extend(store, run, kept.lease_id, group.lease_id, "x/1/y") == ["x/1/y"]
    clock.pass_s(50)
    stats = await stats_of(store, run)
    assert stats.training.num_groups_leased == stats.training.num_groups_training == 1
    assert await return_(store, run, lost.lease_id) == (0, 0)
    clock.pass_s(50)
    assert (await stats_of(store, run)).training.num_groups_scored == 1
    assert await extend(store, run, group.lease_id) == []
    assert (await stats_of(store, run)).training.num_groups_training == 1


async def test_a_late_holder_gets_its_task_back_if_nobody_took_it(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b")
    held = await lease_task(store, run)
    for _ in range(LIMITS.max_attempts + 1):  # and no attempt is counted as failed
        clock.pass_s(61)
        assert await extend(store, run, held.lease_id) == []
        stats = await stats_of(store, run)
        assert (stats.training.num_groups_leased, stats.training.num_tasks_offered) == (1, 1)
    for member in range(2):
        outcome = await append_member(store, run, held.lease_id, member)
        assert outcome.status == pb.APPEND_STATUS_APPENDED
    assert (await stats_of(store, run)).training.num_groups_unscored == 1
    # Nobody else has it: the other task is the next.
    assert (await lease_task(store, run)).task.task_id == "b"


async def test_a_late_holder_does_not_get_back_what_another_has_or_it_returned(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await announce(store, run)
    await offer(store, run, "a")
    slow = await lease_task(store, run)
    clock.pass_s(61)
    fast = await lease_task(store, run)
    assert fast.attempt == slow.attempt + 1
    assert await extend(store, run, slow.lease_id) == [slow.lease_id]
    clock.pass_s(61)
    assert await extend(store, run, slow.lease_id) == [slow.lease_id]
    assert await extend(store, run, fast.lease_id) == []
    assert await return_(store, run, fast.lease_id) == (1, 0)
    assert await extend(store, run, fast.lease_id) == [fast.lease_id]
    assert (await lease_task(store, run)).attempt == fast.attempt + 1


async def test_a_worker_is_told_what_it_holds_and_reopens_it(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a", "b", "c", "d")
    first = (await lease(store, run, Stage.SCORED, num=2)).leases
    await lease(store, run, Stage.SCORED, worker="another")
    ids = [held.lease_id for held in first]
    assert await list_leases(store, run, Stage.SCORED) == ids
    assert await list_leases(store, run, Stage.UNSCORED) == []
    clock.pass_s(50)
    again = await reopen(store, run, *ids[::-1])
    assert (list(again.leases), again.lost_lease_ids) == (first[::-1], [])
    clock.pass_s(50)
    assert await list_leases(store, run, Stage.SCORED) == ids
    await return_(store, run, ids[0])
    assert await list_leases(store, run, Stage.SCORED) == ids[1:]
    assert await ack(store, run, ids[1]) == ""
    assert await list_leases(store, run, Stage.SCORED) == []


async def test_leases_are_reopened_together_or_not_at_all(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a", "b")
    kept, lost = (held.lease_id for held in (await lease(store, run, Stage.SCORED, num=2)).leases)
    await return_(store, run, lost)
    answer = await reopen(store, run, kept, lost, "x/1/y")
    assert (list(answer.leases), answer.lost_lease_ids) == ([], [lost, "x/1/y"])
    clock.pass_s(61)
    assert (await stats_of(store, run)).training.num_groups_scored == 2
    # It ran out, but nobody took it: its holder may go on.
    (again,) = (await reopen(store, run, kept)).leases
    assert (again.lease_id, again.group.group_id) == (kept, "a")
    assert (await stats_of(store, run)).training.num_groups_training == 1


async def test_what_is_returned_is_leased_before_anything_newer(
    store: QueueStore, run: str
) -> None:
    await ready_to_train(store, run, "a", "b", "c")
    taken = (await lease(store, run, Stage.SCORED, num=2)).leases
    for held in reversed(taken):
        await return_(store, run, held.lease_id, failed=True)
    again = await lease(store, run, Stage.SCORED, num=3)
    assert names_of(again.leases) == ["a", "b", "c"]


async def test_a_trained_group_is_redelivered_when_its_trainer_vanishes(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    for _ in range(2):
        await announce(store, run, 1, held.lease_id, credits=4)
    assert (await stats_of(store, run)).training.num_groups_trained == 1
    clock.pass_s(61)
    (again,) = (await lease(store, run, Stage.SCORED)).leases
    assert again.num_deliveries == 2
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"


async def test_a_late_trained_lease_is_taken_back_from_the_queue(
    store: QueueStore, run: str, clock: Clock
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    clock.pass_s(61)
    await announce(store, run, 1, held.lease_id, credits=4)
    assert (await lease(store, run, Stage.SCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS
    assert await ack(store, run, held.lease_id) == ""


async def test_a_policy_only_moves_forward_within_its_lineage(store: QueueStore, run: str) -> None:
    assert await announce(store, run, 2, credits=3) == 3
    assert await announce(store, run, 2, credits=4) == 4
    for lineage, number in (("main", 1), ("main", 0)):
        with pytest.raises(PreconditionFailed) as caught:
            await announce(store, run, number, lineage=lineage)
        assert caught.value.reason == "VERSION_NOT_NEWER"
    assert await announce(store, run, 0, lineage="second", credits=5) == 5
    with pytest.raises(PreconditionFailed):
        await announce(store, run, 9, lineage="main")
    version = (await stats_of(store, run)).policy_version
    assert (version.lineage, version.number) == ("second", 0)


async def test_evaluation_groups_go_to_who_asks_for_their_prefix(
    store: QueueStore, run: str
) -> None:
    await offer(store, run, "e1/a", "e2/a", "e1/b", purpose=Purpose.EVALUATION)
    for _ in range(3):
        await play(store, run, stage=Stage.EVALUATION)
    answer = await lease(store, run, Stage.EVALUATION, num=5, prefix="e1/")
    assert names_of(answer.leases) == ["e1/a", "e1/b"]
    assert (await lease(store, run, Stage.SCORED)).empty_reason == pb.EMPTY_REASON_NO_GROUPS
    for held in answer.leases:
        assert await ack(store, run, held.lease_id) == ""
    counts = (await stats_of(store, run)).evaluation
    assert (counts.num_groups_consumed, counts.num_groups_scored) == (2, 1)
    assert (counts.num_trajectories_consumed, counts.num_trajectories_live) == (4, 2)


async def test_peeking_changes_nothing(store: QueueStore, run: str) -> None:
    await ready_to_train(store, run, "a", "b")
    before = await counts_of(store, run)
    assert await peek(store, run, Stage.SCORED, 1) == ["a"]
    assert await peek(store, run, Stage.UNSCORED, 5) == []
    assert await counts_of(store, run) == before


async def test_a_purged_run_is_forgotten_and_its_leases_are_lost(
    store: QueueStore, run: str
) -> None:
    await ready_to_train(store, run, "a")
    (held,) = (await lease(store, run, Stage.SCORED)).leases
    other = new_run()
    await offer(store, other, "kept")
    await purge(store, run)
    assert (await stats_of(store, run)).training.num_groups_consumed == 0
    assert await ack(store, run, held.lease_id) == "LEASE_LOST"
    assert (await stats_of(store, other)).training.num_tasks_offered == 1
    await purge(store, other)


async def test_many_groups_in_one_call_each_get_their_own_answer(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer(store, run, "a", "b", "c")
    leases = (await lease_tasks(store, run, 3)).leases
    groups = [bare_group(held.task.task_id, held.lease_id) for held in leases]
    stranger = bare_group("x", "task/1/x")
    results = await append(store, run, Stage.UNSCORED, groups[0], stranger, groups[1], groups[0])
    assert [(pb.AppendStatus.Name(r.status), r.reason) for r in results] == [
        ("APPEND_STATUS_APPENDED", ""),
        ("APPEND_STATUS_REJECTED", "UNKNOWN_TASK"),
        ("APPEND_STATUS_APPENDED", ""),
        ("APPEND_STATUS_DUPLICATE", ""),
    ]


async def test_a_uniform_draw_takes_every_group_once_and_in_no_fixed_order(
    store: QueueStore, run: str
) -> None:
    names = "abcdef"
    await ready_to_train(store, run, *names)
    first_draws = set()
    for _ in range(40):
        held = [
            (await lease(store, run, Stage.SCORED, selection=pb.SELECTION_UNIFORM)).leases[0]
            for _ in names
        ]
        assert sorted(names_of(held)) == list(names), "without replacement"
        first_draws.add(held[0].group.group_id)
        for group in held:
            await return_(store, run, group.lease_id)
    assert len(first_draws) > 3


async def test_the_highest_priority_is_leased_first_and_the_oldest_among_equals(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    priorities = {"a": 0.0, "b": 2.5, "c": -1.0, "d": 2.5}
    await offer(store, run, *priorities)
    for name, priority in priorities.items():
        assert await play(store, run) == name
        (held,) = (await lease(store, run, Stage.UNSCORED)).leases
        item = pb.AppendItem(group=held.group, lease_id=held.lease_id, priority=priority)
        assert not (await append(store, run, Stage.SCORED, item))[0].reason
    held_groups = await lease(store, run, Stage.SCORED, num=4, selection=pb.SELECTION_PRIORITY)
    assert names_of(held_groups.leases) == ["b", "d", "a", "c"]
