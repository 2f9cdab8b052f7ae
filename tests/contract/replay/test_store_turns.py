"""What every store does with the turns of episodes in play."""

from __future__ import annotations

from dialoop.v1 import inference_service_pb2
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import QueueStore

from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.replay_store_world import (  # noqa: F401
    clock,
    lease_task,
    return_,
    run,
    store,
)
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append_member,
    make_task,
    offer_tasks,
    purge,
    stats_of,
)

GROUP_SIZE = None  # groups of several sizes


def turn_of(number: int, text: str = "", *, trajectory: str = "t") -> pb.RecordedTurn:
    sampled = inference_service_pb2.GenerateResponse(
        samples=[inference_service_pb2.Sample(stop_string=text or f"turn {number}")]
    )
    return pb.RecordedTurn(
        trajectory_id=trajectory, session_id=f"s-{trajectory}", turn=number, sampled=sampled
    )


async def keep(
    store: QueueStore, run: str, lease_id: str, *turns: pb.RecordedTurn, member: int = 0
) -> list[str]:
    """Append turns; of each the reason why not, or its status where there is none."""
    items = [pb.TurnItem(lease_id=lease_id, member=member, turn=turn) for turn in turns]
    request = pb.AppendTurnsRequest(run=run, items=items)
    outcomes = (await store.apply(request, pb.AppendTurnsResponse)).outcomes
    names = pb.AppendStatus.Name
    return [o.reason or names(o.status).removeprefix("APPEND_STATUS_") for o in outcomes]


async def kept(store: QueueStore, run: str, lease_id: str, member: int = 0) -> list[str]:
    request = pb.GetTurnsRequest(run=run, lease_id=lease_id, member=member)
    turns = (await store.apply(request, pb.GetTurnsResponse)).turns
    assert [turn.turn for turn in turns] == list(range(len(turns)))
    return [turn.sampled.samples[0].stop_string for turn in turns]


async def begin(store: QueueStore, run: str, task_id: str = "a", size: int = 2) -> str:
    await announce(store, run)
    await offer_tasks(store, run, [make_task(task_id, num_trajectories=size)])
    return (await lease_task(store, run)).lease_id


async def test_the_next_holder_of_a_task_gets_the_turns_of_the_one_that_was_killed(
    store: QueueStore, run: str, clock: Clock
) -> None:
    first = await begin(store, run)
    assert await keep(store, run, first, turn_of(0), turn_of(1)) == ["APPENDED"] * 2
    assert await keep(store, run, first, turn_of(0, "other"), member=1) == ["APPENDED"]
    clock.pass_s(61)
    second = await lease_task(store, run)
    assert list(second.recorded_members) == [0, 1]
    assert await kept(store, run, second.lease_id) == ["turn 0", "turn 1"]
    assert await kept(store, run, second.lease_id, member=1) == ["other"]
    assert await kept(store, run, first) == [], "the lease was lost"
    assert await keep(store, run, first, turn_of(2)) == ["LEASE_LOST"]
    assert await keep(store, run, second.lease_id, turn_of(2)) == ["APPENDED"]
    assert await kept(store, run, second.lease_id) == ["turn 0", "turn 1", "turn 2"]
    stats = await stats_of(store, run)
    assert stats.num_rejected_appends == stats.num_duplicate_appends == 0, "these are of members"


async def test_turns_follow_each_other_and_the_same_one_twice_is_a_duplicate(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run)
    assert await keep(store, run, held, turn_of(1)) == ["STEP_GAP"]
    assert await keep(store, run, held, turn_of(0), turn_of(0)) == ["APPENDED", "DUPLICATE"]
    assert await keep(store, run, held, turn_of(0, "else")) == ["DIGEST_MISMATCH"]
    assert await keep(store, run, held, turn_of(1, trajectory="u")) == ["STEP_GAP"]
    assert await keep(store, run, held, turn_of(0), member=2) == ["WRONG_SIZE"]
    assert await keep(store, run, "task/1/b", turn_of(0)) == ["UNKNOWN_TASK"]
    assert await keep(store, run, "scored/1/a", turn_of(0)) == ["LEASE_LOST"]
    assert await kept(store, run, held) == ["turn 0"]


async def test_the_first_turn_of_another_play_takes_the_place_of_all_that_were_kept(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run)
    await keep(store, run, held, turn_of(0), turn_of(1))
    assert await keep(store, run, held, turn_of(0, "anew", trajectory="u")) == ["APPENDED"]
    assert await kept(store, run, held) == ["anew"]


async def test_turns_are_gone_with_the_member_that_is_appended_fails_or_is_given_up(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run, size=3)
    for member in range(3):
        await keep(store, run, held, turn_of(0), member=member)
    assert not (await append_member(store, run, held, 0)).reason
    assert await kept(store, run, held) == []
    assert await keep(store, run, held, turn_of(1)) == ["LEASE_LOST"]
    await return_(store, run, held, failed=True, members=[1])
    again = await lease_task(store, run)
    assert list(again.recorded_members) == [2]
    await return_(store, run, again.lease_id)
    again = await lease_task(store, run)
    assert list(again.recorded_members) == [2], "no attempt failed"
    for _ in range(3):
        await return_(store, run, again.lease_id, failed=True)
        if (await stats_of(store, run)).training.num_groups_dropped:
            break
        again = await lease_task(store, run)
        assert not again.recorded_members
    assert (await stats_of(store, run)).training.num_groups_dropped


async def test_a_turn_is_progress_so_that_many_kills_give_no_long_episode_up(
    store: QueueStore, run: str, clock: Clock
) -> None:
    held = await begin(store, run)
    for number in range(2 * store.limits.max_attempts):
        assert await keep(store, run, held, turn_of(number)) == ["APPENDED"]
        clock.pass_s(61)
        held = (await lease_task(store, run)).lease_id
    for _ in range(store.limits.max_attempts - 1):
        clock.pass_s(61)
        held = (await lease_task(store, run)).lease_id
    clock.pass_s(61)
    dropped = (await stats_of(store, run)).training.num_groups_dropped
    assert dropped == {"lease_expired": 1}, "without another turn it is given up"


async def test_an_episode_that_grows_too_long_for_a_message_is_no_longer_kept(
    store: QueueStore, run: str
) -> None:
    held = await begin(store, run)
    half = "x" * (store.limits.max_lease_bytes // 2)
    assert await keep(store, run, held, turn_of(0, half), turn_of(1, half)) == [
        "APPENDED",
        "TOO_LARGE",
    ]
    assert await kept(store, run, held) == []


async def test_of_snapshots_the_last_turns_alone_is_kept(store: QueueStore, run: str) -> None:
    held = await begin(store, run)
    size = store.limits.max_lease_bytes // 2
    for number in range(3):
        turn = turn_of(number)
        turn.snapshot = bytes([number]) * size
        assert await keep(store, run, held, turn, turn) == ["APPENDED", "DUPLICATE"]
    request = pb.GetTurnsRequest(run=run, lease_id=held, member=0)
    answer = await store.apply(request, pb.GetTurnsResponse)
    assert answer.snapshot == bytes([2]) * size
    assert [turn.snapshot for turn in answer.turns] == [b""] * 3


async def test_a_name_that_looks_like_a_turns_of_another_task_is_none(
    store: QueueStore, run: str
) -> None:
    await announce(store, run)
    await offer_tasks(store, run, [make_task(name) for name in ("a", "0/a", "0.0/a")])
    for text in ("first", "second", "third"):
        await keep(store, run, (await lease_task(store, run)).lease_id, turn_of(0, text))
    await purge(store, run)
    held = await begin(store, run)
    assert await kept(store, run, held) == [], "purged"
