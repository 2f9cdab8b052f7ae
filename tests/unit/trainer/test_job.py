"""The job among fakes: what is trained is never lost, doubled or published under an old number."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_services.runtime.exit_reason import known_error
from dialoop_services.trainer.job.evaluation import EvaluationPlan, EvaluationResult
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.recovery.checkpoint import Saving

from tests.support.trainer_world import World, after, until_extended, worlds
from tests.support.waiting import until


def version(number: int, lineage: str = "main") -> PolicyVersion:
    return PolicyVersion(lineage=lineage, number=number)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as make:
        yield make


async def test_what_is_trained_is_acknowledged_by_the_checkpoint_that_holds_it(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=3, checkpoint_every=2)
    for names in ("ab", "cd", "ef"):
        here.offer(*names)
    await here.run()
    assert here.replay.acknowledged == [f"lease-{name}" for name in "abcdef"]
    assert here.learner.temperatures == [[1.0] * 4] * 3
    assert here.publisher.published == [("main-1", 0), ("main-2", 1), ("main-3", 2), ("main-4", 3)]


async def test_a_group_that_comes_back_before_its_checkpoint_is_let_go_by_that_checkpoint(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, checkpoint_every=100)
    here.offer("a", "b")
    here.offer("a", "c", prefix="second-")
    here.offer("d")
    saved: list[int] = []
    capture = here.checkpoints.capture

    def saved_with(learner: Any, progress: JobState) -> Saving:
        saved.append(len(here.replay.acknowledged))
        return capture(learner, progress)

    here.checkpoints.capture = saved_with  # type: ignore[method-assign]
    await here.run()
    assert here.learner.trained == [4, 4]
    # Nothing had been acknowledged when the checkpoint was written that let go of "a".
    assert saved[:2] == [0, 0]
    assert "second-lease-a" in here.replay.acknowledged


async def test_which_policy_is_best_is_not_said_by_greedy_answers_or_other_tasks(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(evaluation={"num_tasks": 9, "num_running_tasks": 4})
    result = EvaluationResult(
        **{"mean_reward": 0.5, "accuracy": None, "tool_call_rate": 0.0, "num_trajectories": 9},
        **{"num_failed": 0, "oldest": version(1), "newest": version(1)},
    )

    async def evaluate(*_: Any, **__: Any) -> EvaluationResult:
        return result

    monkeypatch.setattr(here.evaluator, "evaluate", evaluate)
    sampled = EvaluationPlan.full(here.settings, "after_sampled", temperature=1.0)
    greedy = EvaluationPlan.full(here.settings, "after_greedy", temperature=0.0)
    others = replace(sampled, label="on_request", split="train")
    for plan in (sampled, greedy, others, EvaluationPlan.running(here.settings)):
        await here.job.evaluate(plan)
    assert here.publisher.earned == [0.5, None, None, 0.5]


async def test_a_caller_who_leaves_a_publish_does_not_get_its_number_used_twice(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)
    running = asyncio.create_task(here.run())
    await until(lambda: here.publisher.announced)
    here.publisher.gate.clear()
    asking = asyncio.create_task(here.job.publish())
    await until(lambda: len(here.publisher.published) == 2)
    asking.cancel()
    await asyncio.wait([asking])
    here.offer("a", "b")
    here.publisher.gate.set()
    await running
    assert here.publisher.published == [("main-1", 0), ("main-2", 0), ("main-3", 1)]


async def test_a_publish_while_a_batch_is_leased_makes_what_is_too_old_stale(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1, max_staleness=0, pipeline_depth=0)
    running = asyncio.create_task(here.run())
    await until(lambda: here.publisher.announced)
    here.publisher.gate.clear()
    asking = asyncio.create_task(here.job.publish())
    await until(lambda: len(here.publisher.published) == 2)
    here.offer("a", "b", policy=version(1))
    await until(lambda: not here.replay.batches)
    await asyncio.sleep(0.01)
    here.publisher.gate.set()
    await asking
    here.offer("c", "d")
    await running
    assert here.replay.dropped == {"lease-a": "stale", "lease-b": "stale"}
    assert here.learner.trained == [4]


async def test_a_kept_group_that_is_delivered_again_is_trained_once(
    world: Callable[..., World],
) -> None:
    """A queue that lost its newest leases delivers what the trainer still has in hand."""
    here = world(num_steps=1)
    here.offer("a")
    here.offer("a", prefix="second-")
    here.offer("b")
    await here.run()
    assert here.learner.trained == [4]
    assert here.replay.acknowledged == ["second-lease-a", "lease-b"]


async def test_a_batch_of_which_every_update_is_refused_is_no_train_step(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1, candidates={"max_empty_batches": 1})
    train_step = here.learner.train_step
    alarms: list[set[str]] = []

    def refuse_first(rows: Any) -> Any:
        report = train_step(rows)
        alarms.append(set(here.board.alarms))
        return replace(report, num_updates=len(alarms) - 1, num_refused=2 - len(alarms))

    here.learner.train_step = refuse_first  # type: ignore[method-assign]
    here.offer("a", "b")
    here.offer("c", "d")
    await here.run()
    assert (here.job.state.num_train_steps, here.job.state.num_empty_batches) == (1, 1)
    assert alarms == [set(), {"NO_SIGNAL", "REFUSED_UPDATES"}]
    assert not here.board.alarms
    rows = [(row["kind"], row["train_step"], row["policy_version"]) for row in here.rows]
    assert rows == [("publish", 0, 1), ("refused", 0, 1), ("publish", 1, 2), ("train", 1, 2)]
    written = (here.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    outcomes = [json.loads(line)["outcome"] for line in written]
    assert outcomes == ["refused"] * 4 + ["trained"] * 4
    assert sum(here.job.state.trained_lengths.values()) == 4
    assert here.replay.dropped == {"lease-a": "refused", "lease-b": "refused"}
    assert here.publisher.published == [("main-1", 0), ("main-2", 2)]


async def test_ten_refused_updates_in_a_row_end_the_job_and_publish_nothing(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=20)
    train_step = here.learner.train_step

    def refuse(rows: Any) -> Any:
        return replace(train_step(rows), num_updates=0, num_refused=4)

    here.learner.train_step = refuse  # type: ignore[method-assign]
    for number in range(20):
        here.offer(f"a{number}", f"b{number}")
    with pytest.raises(BaseExceptionGroup) as caught:
        await here.run()
    error = known_error(caught.value)
    assert isinstance(error, InvalidConfig)
    assert error.reason == "UPDATES_REFUSED"
    assert "The last 12 updates were refused: what was not finite." in str(error)
    assert len(here.learner.trained) == 3
    assert here.publisher.published == [("main-1", 0)]


async def test_no_step_starts_after_a_pause_and_its_leases_are_kept(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1, lease_s=0.03)
    running = asyncio.create_task(here.run())
    await until(lambda: here.publisher.announced)
    here.board.pause()
    here.offer("a", "b")
    await until(lambda: len(here.replay.extended) > 2)
    assert not here.learner.trained
    assert here.replay.extended[-1] == ("lease-a", "lease-b")
    here.board.resume()
    await running
    assert here.learner.trained == [4]


async def test_the_rows_of_a_batch_are_read_once(world: Callable[..., World]) -> None:
    here = world(num_steps=2)
    here.offer("a", "b")
    here.offer("c", "d")
    await here.run()
    assert here.learner.trained == [4, 4]
    assert here.learner.read_under == [version(1), version(2)]


async def test_rows_that_a_publish_has_made_older_are_read_again(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)
    running = asyncio.create_task(here.run())
    await until(lambda: here.publisher.announced)
    here.board.pause()
    here.offer("a", "b")
    await until(lambda: here.learner.read_under)
    await here.job.publish()
    here.board.resume()
    await running
    assert here.learner.trained == [4]
    assert here.learner.read_under == [version(1), version(2)]


async def test_leases_are_extended_while_a_train_step_takes_longer_than_they_last(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1, lease_s=0.03)
    here.learner.while_training = lambda: until_extended(here, 3)
    here.offer("a", "b")
    await here.run()
    assert len(here.replay.extended) > 2


class Killed(Exception):
    """What ends the process in these tests."""


async def test_a_checkpoint_that_was_not_acknowledged_is_when_the_trainer_restarts(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, checkpoint_every=1)
    here.offer("a", "b")
    acknowledge = here.replay.acknowledge

    async def kill(run: str, lease_ids: list[str]) -> tuple[str, ...]:
        if lease_ids:
            raise Killed
        return await acknowledge(run, lease_ids)

    here.replay.acknowledge = kill  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = world(num_steps=2)
    again.replay.policy_version = version(2)
    again.offer("c", "d")
    await again.run()
    assert again.replay.acknowledged == [f"lease-{name}" for name in "abcd"]
    assert again.publisher.published == [("main-2", 1), ("main-3", 2)]


async def test_steps_are_trained_while_a_checkpoint_is_saved_and_a_kill_loses_none(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(num_steps=4, checkpoint_every=1)
    may_end = threading.Event()
    here.learner.while_saving = lambda: here.learner.weights and may_end.wait()
    for names in ("ab", "cd", "ef", "gh"):
        here.offer(*names)
    running = asyncio.create_task(here.run())
    await until(lambda: here.learner.weights == 2 and len(rows_of_journals(tmp_path)) == 2)
    assert here.replay.acknowledged == []
    # Killed before it is whole, or as soon as it is: the lines are in the journals of both.
    older, newer = rows_of_journals(tmp_path)
    assert (older, newer) == ([1, 2], [2])
    await asyncio.sleep(0.02)
    assert here.learner.weights == 2, "the next checkpoint waits for this one"
    may_end.set()
    await running
    assert here.replay.acknowledged == [f"lease-{name}" for name in "abcdefgh"]


def rows_of_journals(run_dir: Path) -> list[list[int]]:
    """The train steps in the journal of each checkpoint, the older ones first."""
    folders = sorted((run_dir / "checkpoints").glob("main-*"))
    journals = [folder / "journal.jsonl" for folder in folders]
    return [
        [json.loads(line)["train_step"] for line in path.read_text("utf-8").splitlines()]
        for path in journals
        if path.is_file()
    ]


async def test_a_checkpoint_that_cannot_be_written_ends_a_job_that_waits_for_groups(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(num_steps=3, checkpoint_every=1)

    def fail() -> None:
        if here.learner.weights:
            raise PreconditionFailed("The disk is full.", reason=Reason.WRITE_FAILED)

    here.learner.while_saving = fail
    here.offer("a", "b")
    with pytest.raises(ExceptionGroup) as caught:
        await here.run()
    assert known_error(caught.value).reason is Reason.WRITE_FAILED
    assert here.replay.acknowledged == []
    assert len(list((tmp_path / "checkpoints").glob("main-*"))) == 1
    again = after(here, world(num_steps=1))  # the journal has the step, and the queue its groups
    await again.run()
    assert again.replay.acknowledged == ["lease-a", "lease-b"]


async def test_a_number_that_was_announced_and_lost_does_not_come_back_in_its_lineage(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=0)
    await here.run()
    # Killed right after main-2 was announced to the queue, before any file named it.
    again = world(num_steps=0)
    again.replay.policy_version = version(2)
    await again.run()
    assert again.publisher.published == [("main.1-1", 0)]
    assert again.board.state.num_train_steps == 0


async def test_an_evaluation_that_fails_does_not_end_the_training(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=3, evaluation={"every": 1, "num_tasks": 1})
    for names in ("ab", "cd", "ef"):
        here.offer(*names)
    await here.run()
    assert here.learner.trained == [4, 4, 4]
    assert here.evaluator.num_asked == 2


async def test_nothing_is_published_or_saved_in_the_middle_of_a_warm_start(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=0, warm_start={"num_steps": 3})
    here.board.pause()
    running = asyncio.create_task(here.run())
    await asyncio.sleep(0.01)
    asking = [asyncio.create_task(act()) for act in (here.job.publish, here.job.checkpoint)]
    await asyncio.sleep(0.01)
    assert not here.publisher.published
    assert not any(call.done() for call in asking)
    here.board.resume()
    await asyncio.gather(running, *asking)
    assert [name for name, _ in here.publisher.published] == ["main-1", "main-2"]


async def test_a_queue_that_forgot_everything_is_told_the_policy_again(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)
    running = asyncio.create_task(here.run())
    await until(lambda: len(here.publisher.announced) > 1)
    assert set(here.publisher.announced) == {"main-1"}
    here.offer("a", "b")
    await running


async def test_a_restarted_run_counts_the_seconds_of_what_its_checkpoint_holds(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, checkpoint_every=1)
    here.learner.while_training = lambda: time.sleep(0.05)
    here.offer("a", "b")
    here.replay.batches.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ExceptionGroup):
        await here.run()
    restored = here.checkpoints.restore(here.learner)  # type: ignore[arg-type]
    assert restored is not None
    assert restored.phase_seconds["train"]["wall_s"] > 0.05
