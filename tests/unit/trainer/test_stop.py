"""A job that is stopped, rewound, fed nothing or alarmed: what it leaves and what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.replay import GroupLease
from dialoop.clients.trainer import Phase
from dialoop.errors import DataLost, DeadlineExceeded, InvalidConfig, InvalidInput, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_ops.stack.report.plot import draw_learning, read_metrics
from dialoop_services.trainer.__main__ import _run_until_stopped, require_new_failure
from dialoop_services.trainer.job.checkpointer import DEAD_LETTERS_FORGOTTEN
from dialoop_services.trainer.job.policy_versions import PUBLISH_WAITS, REPLICA_BEHIND
from dialoop_services.trainer.job.status import StatusBoard
from dialoop_services.trainer.job.train_steps import FRESH_MISMATCH, GROUPS_SET_ASIDE
from dialoop_services.trainer.publish.publisher import PolicyNotKept

from tests.support.trainer_world import World, lease, worlds
from tests.support.waiting import PATIENCE_S, until

FIRST = PolicyVersion(lineage="main", number=1)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as make:
        yield make


class FakeServer:
    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def wait_until_stopped(self) -> None:
        await self.told.wait()


async def run_until_stopped(
    here: World,
    server: FakeServer,
    *,
    drain_s: float = 5.0,
    failures: tuple[asyncio.Future[None], ...] = (),
    exit_when_done: bool = False,
) -> None:
    await _run_until_stopped(
        server,  # type: ignore[arg-type]
        here.job,
        here.board,
        drain_s=drain_s,
        failures=failures,
        exit_when_done=exit_when_done,
    )


def uniform(*names: str) -> list[GroupLease]:
    """Leased groups whose trajectories have no advantage."""
    leases = []
    for name in names:
        leased = lease(name, FIRST)
        members = tuple(
            replace(t, sequences=tuple(replace(s, advantage=0.0) for s in t.sequences))
            for t in leased.group.trajectories
        )
        leases.append(replace(leased, group=replace(leased.group, trajectories=members)))
    return leases


def rows(here: World, kind: str) -> list[dict[str, Any]]:
    path = here.settings.run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in lines if row["kind"] == kind]


async def test_uniform_groups_are_counted_in_the_row_of_the_step_that_they_delayed(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(num_steps=1)
    here.replay.batches.append(lambda: uniform("a", "b"))
    here.offer("c", "d")
    await here.run()
    (row,) = rows(here, "train")
    counts = row["train_step"], row["num_groups_trained"], row["num_groups_dropped"]
    assert counts == (1, 2, 2)
    assert set(here.replay.dropped.values()) == {"uniform_reward"}
    draw_learning(tmp_path / "metrics.jsonl", tmp_path / "learning.png")


async def test_a_stopped_job_ends_its_train_step_saves_it_and_acknowledges_it(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=10, checkpoint_every=100), FakeServer()
    here.learner.while_training = server.told.set
    here.offer("a", "b")
    await run_until_stopped(here, server)
    assert here.replay.acknowledged == ["lease-a", "lease-b"]
    again = world(num_steps=10)
    assert again.checkpoints.restore(again.learner).num_train_steps == 1  # type: ignore
    assert again.learner.weights == 1


async def test_a_trainer_that_nobody_else_ends_exits_when_its_job_is_done(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=1), FakeServer()
    here.offer("a", "b")
    async with asyncio.timeout(30):
        await run_until_stopped(here, server, exit_when_done=True)
    again = world(num_steps=1)
    assert again.checkpoints.restore(again.learner).num_train_steps == 1  # type: ignore
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await run_until_stopped(world(num_steps=1), server)


async def test_a_stopped_job_gives_back_what_it_leased_and_did_not_train(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=10), FakeServer()
    running = asyncio.create_task(run_until_stopped(here, server))
    await until(lambda: here.publisher.announced)
    here.board.pause()
    here.offer("a", "b")
    await until(lambda: not here.replay.batches)
    await asyncio.sleep(0.01)
    server.told.set()
    await running
    assert here.replay.given_back == ["lease-a", "lease-b"]
    assert not here.learner.trained


async def test_a_job_that_cannot_stop_in_the_drain_time_is_cut_short(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=10), FakeServer()
    running = asyncio.create_task(run_until_stopped(here, server, drain_s=0.05))
    await until(lambda: here.publisher.announced)
    here.publisher.gate.clear()
    asking = asyncio.create_task(here.job.publish())
    await until(lambda: len(here.publisher.published) == 2)
    server.told.set()
    async with asyncio.timeout(PATIENCE_S):
        await running
    here.publisher.gate.set()
    await asking


async def test_a_warm_start_goes_on_with_the_batches_it_has_not_seen(
    world: Callable[..., World],
) -> None:
    settings = {"num_steps": 0, "warm_start": {"num_steps": 6, "checkpoint_every": 2}}
    here = world(**settings)
    step, taken = here.learner.warm_start_step, 0

    def kill(batch: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 6:
            raise KeyError("killed")
        return step(batch)

    here.learner.warm_start_step = kill  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        await here.run()
    again = world(**settings)
    await again.run()
    assert again.learner.warm_started == [[5], [6]]
    assert again.learner.weights == 6
    assert again.publisher.published == [("main-1", 6)]


async def test_a_warm_start_that_is_stopped_saves_where_it_is(world: Callable[..., World]) -> None:
    here = world(num_steps=0, warm_start={"num_steps": 50})
    step = here.learner.warm_start_step

    def stop(batch: Any) -> Any:
        if batch == [7]:
            here.board.stop()
        return step(batch)

    here.learner.warm_start_step = stop  # type: ignore[method-assign]
    await here.run()
    assert not here.publisher.published
    again = world(num_steps=0, warm_start={"num_steps": 50})
    assert again.checkpoints.restore(again.learner).num_warm_start_steps == 7  # type: ignore


async def test_rows_of_steps_that_a_restore_took_back_are_not_read(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(num_steps=3, checkpoint_every=2, pipeline_depth=0)
    for names in ("ab", "cd", "ef"):
        here.offer(*names)
    taken = here.job.checkpointer.begin
    num = 0

    async def kill() -> None:
        nonlocal num
        num += 1
        if num == 3:  # the first policy, step 2, the end
            raise KeyError("killed")
        await taken()

    here.job.checkpointer.begin = kill  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        await here.run()
    assert [row["train_step"] for row in rows(here, "train")] == [1, 2, 3]
    again = world(num_steps=3)
    again.replay.policy_version = replace(FIRST, number=4)
    again.offer("g", "h")
    await again.run()
    assert [row["train_step"] for row in rows(again, "train")] == [1, 2, 3, 3]
    read = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["train_step"] for row in read] == [1, 2, 3]
    assert read[2]["lineage"] == "main.1"


async def test_fresh_data_on_which_engine_and_trainer_disagree_is_an_alarm(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(num_steps=1)
    here.learner.fresh_mismatch_kl = 0.02
    here.offer("a", "b")
    await here.run()
    (row,) = rows(here, "train")
    assert (row["fresh_mismatch_kl"], row["fresh_mismatch_alarm"]) == (0.02, True)
    assert here.board.alarms == {FRESH_MISMATCH}
    assert "disagree" in caplog.text


async def test_an_alarm_names_the_depth_from_which_engine_and_trainer_disagree(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(num_steps=2)
    depths = {0: 1e-5, 128: 1e-5, 256: 0.02, 512: 0.1}
    here.learner.fresh_mismatch_kl = 5e-3  # the mean over all tokens hides it
    here.learner.fresh_by_depth = {
        depth: {"num_tokens": 500.0, "mismatch_kl": kl} for depth, kl in depths.items()
    }
    alarms = []
    here.learner.while_training = lambda: alarms.append(set(here.board.alarms))
    here.offer("a", "b")
    here.offer("c", "d")
    await here.run()
    assert alarms[-1] == {FRESH_MISMATCH, f"{FRESH_MISMATCH}_FROM_256"}
    assert here.board.alarms == alarms[-1]
    first = rows(here, "train")[0]
    assert first["fresh_mismatch_alarm"]
    assert first["by_depth"]["256"]["mismatch_kl"] == 0.02
    assert caplog.records[-1].from_depth == 256  # type: ignore[attr-defined]


async def test_an_alarm_ends_when_fresh_data_agrees_again(world: Callable[..., World]) -> None:
    here = world(num_steps=2)
    here.learner.fresh_mismatch_kl = float("nan")
    here.offer("a", "b")
    running = asyncio.create_task(here.run())
    await until(lambda: here.board.alarms)
    here.learner.fresh_mismatch_kl = 0.001
    here.offer("c", "d")
    await running
    assert not here.board.alarms
    assert [row["fresh_mismatch_alarm"] for row in rows(here, "train")] == [True, False]


def offer_refused(here: World, *refused: str, good: tuple[str, ...] = ()) -> None:
    """A batch of groups the learner has no rows for, and of good ones."""
    bad: list[Any] = []

    def refuses(sequence: Any) -> None:
        if any(sequence is spoilt for spoilt in bad):
            raise InvalidInput(f"This loss needs {refused[0]}.", reason="LOSS_INPUT_MISSING")

    def batch() -> list[GroupLease]:
        leases = [lease(name, FIRST) for name in refused]
        bad.extend(s for each in leases for t in each.group.trajectories for s in t.sequences)
        here.learner.refuses = refuses
        return leases + [lease(name, FIRST) for name in good]

    here.replay.batches.append(batch)


async def test_a_job_of_which_no_batch_can_be_trained_fails_and_names_the_fault(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=1, max_bad_groups=1), FakeServer()
    for names in ("ab", "cd", "ef", "gh"):
        offer_refused(here, *names)
    with pytest.raises(ExceptionGroup):
        await run_until_stopped(here, server)
    assert here.board.phase is Phase.FAILED
    assert here.board.failure == "This loss needs e."
    assert here.board.alarms == {GROUPS_SET_ASIDE}
    assert list(here.replay.set_aside) == [f"lease-{name}" for name in "abcdef"]


async def test_a_job_of_one_group_a_step_stands_more_than_three_bad_ones_in_a_row(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=2, groups_per_train_step=1, max_bad_groups=5), FakeServer()
    for name in "abcd":
        offer_refused(here, name)
    here.offer("e")
    for name in "fghijk":
        offer_refused(here, name)
    with pytest.raises(ExceptionGroup):
        await run_until_stopped(here, server)
    assert here.learner.trained == [2]
    assert here.board.failure == "This loss needs j."
    assert list(here.replay.set_aside) == [f"lease-{name}" for name in "abcdfghij"]


async def test_a_job_of_which_every_group_fails_while_it_is_played_fails_too(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=1, max_bad_groups=1), FakeServer()
    here.replay.num_groups_dropped = {"member_failed": 5}
    running = asyncio.create_task(run_until_stopped(here, server))
    await asyncio.sleep(0.05)
    assert here.board.phase is not Phase.FAILED  # three batches of two may fail
    here.replay.num_groups_dropped["member_failed"] = 6
    with pytest.raises(ExceptionGroup):
        await running
    assert here.board.failure.startswith("All of the first 6 groups failed")


async def test_dead_letters_that_the_queue_could_not_keep_are_an_alarm(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(num_steps=1)
    here.replay.num_groups_dropped = {"dead_letter": 1000}
    here.offer("a", "b")
    await here.run()
    assert not here.board.alarms
    here.replay.num_groups_dropped["dead_letter_forgotten"] = 3
    await here.job.checkpoint()
    assert here.board.alarms == {DEAD_LETTERS_FORGOTTEN}
    assert "forgotten" in caplog.text


async def test_bad_groups_are_an_alarm_until_a_batch_is_trained_and_fail_no_job_that_trains(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, max_staleness=9)
    running = asyncio.create_task(here.run())
    for batch in ("ab", "cd"):
        offer_refused(here, *batch)
    offer_refused(here, "e", good=("f",))  # so f is worth waiting for
    for batch in ("gh", "ij"):
        offer_refused(here, *batch)
    await until(lambda: len(here.replay.set_aside) == 9)
    assert here.board.alarms == {GROUPS_SET_ASIDE}
    here.offer("k", "l")
    await until(lambda: here.learner.trained)
    await until(lambda: not here.board.alarms)
    for batch in ("mn", "op"):
        offer_refused(here, *batch)
    here.offer("q", "r")
    await running
    assert not here.board.alarms
    assert here.board.state.num_train_steps == 2


async def test_a_failed_job_says_why_and_nothing_of_what_is_not_ours(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=1), FakeServer()
    here.replay.batches.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ExceptionGroup):
        await run_until_stopped(here, server)
    assert here.board.phase is Phase.FAILED
    assert "division" not in here.board.failure
    board = StatusBoard()
    board.fail(ExceptionGroup("tasks", [DataLost("The weights are gone.")]))
    assert "The weights are gone." in board.failure


@pytest.mark.parametrize(
    ("settings", "rewards", "num_steps", "reason"),
    [
        ({"stop_at": 0.8}, [0.5, 0.9, 0.9, 0.9], 3, "reached 0.9"),
        ({"stop_without_gain": 2}, [0.5, 0.4, 0.5, 0.9], 4, "2 held-out evaluations"),
        ({}, [0.5, 0.9, 0.4, 0.4, 0.4], 6, ""),
    ],
)
async def test_training_stops_early_as_the_settings_say(
    world: Callable[..., World],
    settings: dict[str, Any],
    rewards: list[float],
    num_steps: int,
    reason: str,
) -> None:
    here = world(num_steps=6, evaluation={"every": 1, "num_tasks": 1, **settings})
    here.evaluator.rewards = rewards
    running = asyncio.create_task(here.run())
    for number in range(6):
        num_asked = here.evaluator.num_asked
        here.offer(f"a{number}", f"b{number}")
        await until(
            lambda num_asked=num_asked: (
                running.done()
                or here.evaluator.num_asked > num_asked
                or here.board.state.num_train_steps == 6
            )
        )
    async with asyncio.timeout(PATIENCE_S):
        await running
    result = json.loads((here.settings.run_dir / "trainer.json").read_text("utf-8"))
    # One step may have begun while the evaluation ran.
    assert num_steps - 1 <= result["num_train_steps"] <= num_steps
    assert reason in result["stopped_early"]
    assert bool(reason) == bool(result["stopped_early"])


async def test_a_resumed_job_counts_its_empty_batches_anew(world: Callable[..., World]) -> None:
    stopped = world(num_steps=2, candidates={"stop_after_empty": 1})
    train_step = stopped.learner.train_step
    stopped.learner.train_step = lambda rows: replace(  # type: ignore[method-assign]
        train_step(rows), num_updates=0, num_refused=1
    )
    stopped.offer("a", "b")
    await stopped.run()
    assert stopped.job.state.stopped_early.startswith("1 empty batches in a row")
    again = world(num_steps=2, candidates={"stop_after_empty": 1})
    again.replay.policy_version = stopped.job.state.policy_version
    again.offer("c", "d")
    again.offer("e", "f")
    await again.run()
    assert (again.job.state.num_train_steps, again.job.state.stopped_early) == (2, "")


@pytest.mark.parametrize(("stop_at", "num_steps"), [(0.8, 1), (None, 2)])
async def test_a_resumed_job_ends_early_by_the_settings_that_it_has(
    world: Callable[..., World], stop_at: float | None, num_steps: int
) -> None:
    stopped = world(num_steps=2, evaluation={"stop_at": 0.8})
    stopped.offer("a", "b")
    stopped.learner.while_training = lambda: stopped.job.schedule.observe(0.9)
    await stopped.run()
    again = world(num_steps=2, evaluation={"stop_at": stop_at})
    again.replay.policy_version = stopped.job.state.policy_version
    again.offer("c", "d")
    await again.run()
    assert again.job.state.num_train_steps == num_steps
    assert bool(again.job.state.stopped_early) == bool(stop_at)


async def test_an_unforeseen_error_of_a_request_ends_a_job_that_is_done(
    world: Callable[..., World],
) -> None:
    """What the process holds may be wrong after it, so it does not go on serving."""
    here, server = world(num_steps=0), FakeServer()
    broken = asyncio.wrap_future(here.job.broken)
    running = asyncio.create_task(run_until_stopped(here, server, failures=(broken,)))
    await until(lambda: here.board.phase is Phase.DONE)
    here.learner.snapshot = lambda _: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        await here.job.checkpoint()
    with pytest.raises(ZeroDivisionError):
        await running
    assert here.board.phase is Phase.FAILED


async def test_a_requested_policy_that_is_live_and_not_on_the_disk_ends_a_job_that_is_done(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=0), FakeServer()
    broken = asyncio.wrap_future(here.job.broken)
    running = asyncio.create_task(run_until_stopped(here, server, failures=(broken,)))
    await until(lambda: here.board.phase is Phase.DONE)

    async def publish(version: PolicyVersion, **named: Any) -> Any:
        raise PolicyNotKept("The disk is full.", reason=Reason.WRITE_FAILED)

    here.publisher.publish = publish  # type: ignore[method-assign]
    with pytest.raises(PolicyNotKept):
        await here.job.publish()
    with pytest.raises(PolicyNotKept):
        await running
    assert here.board.phase is Phase.FAILED


async def test_a_request_that_is_refused_leaves_the_job_as_it_is(
    world: Callable[..., World],
) -> None:
    here, server = world(num_steps=0), FakeServer()
    broken = asyncio.wrap_future(here.job.broken)
    running = asyncio.create_task(run_until_stopped(here, server, failures=(broken,)))
    await until(lambda: here.board.phase is Phase.DONE)

    def refuse(directory: Path) -> None:
        raise DataLost("The disk is full.")

    here.learner.snapshot = refuse  # type: ignore[method-assign]
    with pytest.raises(DataLost):
        await here.job.checkpoint()
    server.told.set()
    await running
    assert here.board.phase is Phase.DONE


async def test_a_publish_that_waits_for_replicas_is_an_alarm_and_a_requested_one_ends(
    world: Callable[..., World],
) -> None:
    """The job itself waits on, since without a replica there is nothing to train."""
    here = world(num_steps=0, publish_deadline_s=0.4)
    publish = here.publisher.publish
    is_away = True

    async def late(version: PolicyVersion, **named: Any) -> Any:
        await asyncio.sleep(0.04)
        if is_away:
            raise DeadlineExceeded("No replica.", reason=Reason.PUBLISH_TIMED_OUT)
        return await publish(version, **named)

    here.publisher.publish = late  # type: ignore[method-assign]
    running = asyncio.create_task(here.run())
    await asyncio.sleep(0.05)
    assert here.board.alarms == set(), "a replica that starts with the job takes longer"
    await until(lambda: here.board.alarms == {PUBLISH_WAITS})
    await asyncio.sleep(0.1)
    assert here.board.alarms == {PUBLISH_WAITS}
    is_away = False
    await running
    assert here.board.alarms == set()
    is_away = True
    with pytest.raises(DeadlineExceeded):
        await here.job.publish()
    assert here.board.alarms == set()
    assert not here.job.broken.done()


@pytest.mark.parametrize(("num_behind", "alarms"), [(0, set()), (1, {REPLICA_BEHIND})])
async def test_a_replica_that_missed_a_publish_is_an_alarm_until_a_publish_finds_it_there(
    world: Callable[..., World], num_behind: int, alarms: set[str]
) -> None:
    here = world(num_steps=0)
    here.board.raise_alarm(REPLICA_BEHIND, on=True)
    here.publisher.num_behind = num_behind
    await here.run()
    assert here.board.alarms == alarms


async def test_a_queue_full_of_trained_groups_gets_a_checkpoint_before_it_is_due(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(num_steps=2, checkpoint_every=1000)
    here.offer("a", "b")
    here.replay.is_full = True
    acknowledge, saved = here.replay.acknowledge, list[int]()

    async def free(run: str, lease_ids: list[str]) -> tuple[str, ...]:
        if lease_ids:
            saved.append(here.job.state.num_train_steps)
        if lease_ids and here.replay.is_full:
            here.replay.is_full = False
            here.offer("c", "d")
        return await acknowledge(run, lease_ids)

    monkeypatch.setattr(here.replay, "acknowledge", free)
    await here.run()
    assert here.learner.trained == [4, 4]
    assert saved == [1, 2], "one for the full queue, one at the end"


async def test_a_queue_that_is_full_and_that_training_cannot_empty_raises_an_alarm(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)
    here.replay.is_full = True
    alarms = list[set[str]]()

    def note_alarms() -> list[GroupLease]:
        alarms.append(set(here.board.alarms))
        return []

    here.replay.batches += [note_alarms, note_alarms]
    here.offer("a", "b")
    await here.run()
    assert alarms == [set(), {"QUEUE_FULL"}]
    assert here.board.alarms == set()


async def test_a_queue_that_is_not_full_gets_its_checkpoints_when_they_are_due(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, checkpoint_every=1000)
    here.offer("a", "b")
    for _ in range(3):
        here.replay.batches.append(list)
    here.offer("c", "d")
    await here.run()
    assert here.replay.acknowledged == ["lease-a", "lease-b", "lease-c", "lease-d"]
    saved = {path.name for path in (here.run_dir / "checkpoints").glob("*-*")}
    assert saved == {"main-1-000000", "main-3-000002"}, "at the beginning and at the end"


def test_the_same_failure_twice_at_one_step_is_final_and_one_that_may_pass_is_not(
    tmp_path: Path,
) -> None:
    mistake = ValueError("wrong shape")
    for step in (3, 4):  # another step is another failure
        require_new_failure(tmp_path, step, mistake)
    for _ in range(2):
        require_new_failure(tmp_path, 5, Unavailable("away"))
    with pytest.raises(InvalidConfig, match="failed twice after train step 4: ValueError: wrong"):
        require_new_failure(tmp_path, 4, ExceptionGroup("tasks", [mistake]))
