"""What becomes of evaluations that were under way when their trainer ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dialoop_ops.stack.report.plot import read_metrics

from tests.support.trainer_world import Killed, World, after, killed_after, worlds
from tests.support.waiting import PATIENCE_S

EVALUATING: dict[str, Any] = {"num_steps": 3, "evaluation": {"every": 2, "num_tasks": 1}}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, checkpoint_every=100) as make:
        yield make


def hold_running(here: World) -> list[str]:
    """Running evaluations never end from now on; the labels of those that began."""
    evaluate, begun = here.evaluator.evaluate, []

    async def hold(plan: Any, **options: Any) -> Any:
        if plan.label == "running":
            begun.append(plan.label)
            await asyncio.Event().wait()
        return await evaluate(plan, **options)

    here.evaluator.evaluate = hold  # type: ignore[method-assign]
    return begun


def running_rows(here: World) -> list[tuple[int, int, float]]:
    """After which step each was due, at which it was done, and what came out."""
    rows = read_metrics(here.settings.run_dir / "metrics.jsonl")
    running = [row for row in rows if row["kind"] == "evaluation" and row["label"] == "running"]
    return [(row["due_train_step"], row["train_step"], row["mean_reward"]) for row in running]


@pytest.mark.parametrize("checkpoint_every", [1, 2, 3, 100])
async def test_an_evaluation_that_a_kill_cut_short_is_run_again_once(
    world: Callable[..., World], checkpoint_every: int
) -> None:
    settings = {**EVALUATING, "num_steps": 4, "checkpoint_every": checkpoint_every}
    here = world(**settings)
    begun = hold_running(here)
    await killed_after(here, "ab", "cd", "ef")
    assert begun
    assert not running_rows(here)
    again = after(here, world(**settings))
    again.evaluator.rewards = [0.5, 0.75]
    again.offer("g", "h")
    await again.run()
    assert again.evaluator.num_swept == 1
    assert [(due, reward) for due, _, reward in running_rows(again)] == [(2, 0.5)]
    assert again.job.state.best_evaluation == 0.5
    third = world(**settings)
    third.replay.policy_version = again.job.state.policy_version
    await third.run()
    assert len(running_rows(third)) == 1


async def test_an_evaluation_whose_row_was_written_before_the_kill_is_judged_by_it(
    world: Callable[..., World],
) -> None:
    here = world(**EVALUATING)
    here.evaluator.rewards = [0.5]

    def kill(due: int, **options: Any) -> None:
        raise Killed

    here.job.schedule.mark_evaluated = kill  # type: ignore[method-assign]
    here.offer("a", "b")
    here.offer("c", "d")
    with pytest.raises(ExceptionGroup):
        await here.run()
    assert len(running_rows(here)) == 1
    again = after(here, world(**EVALUATING))
    again.offer("e", "f")
    await again.run()
    assert again.evaluator.num_asked == 0
    assert again.job.state.best_evaluation == 0.5
    assert running_rows(again) == running_rows(here)


async def test_an_evaluation_that_failed_is_not_run_again(world: Callable[..., World]) -> None:
    here = world(**EVALUATING)
    here.offer("a", "b")
    here.offer("c", "d")
    running = asyncio.create_task(here.run())
    async with asyncio.timeout(PATIENCE_S):
        while not any(entry.evaluated for entry in here.job.checkpointer.journal.entries()):
            await asyncio.sleep(0.002)
    here.replay.batches.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ExceptionGroup):
        await running
    again = after(here, world(**EVALUATING))
    again.offer("e", "f")
    await again.run()
    assert (here.evaluator.num_asked, again.evaluator.num_asked) == (1, 0)


async def test_an_evaluation_that_a_stop_cut_short_is_run_by_the_next_trainer(
    world: Callable[..., World],
) -> None:
    here = world(**EVALUATING)
    begun = hold_running(here)
    here.offer("a", "b")
    here.offer("c", "d")
    running = asyncio.create_task(here.run())
    async with asyncio.timeout(PATIENCE_S):
        while not begun:
            await asyncio.sleep(0.002)
    here.board.stop()
    await running
    again = after(here, world(**EVALUATING))
    again.evaluator.rewards = [0.5]
    again.offer("e", "f")
    await again.run()
    assert [(due, reward) for due, _, reward in running_rows(again)] == [(2, 0.5)]


async def test_a_job_that_has_ended_is_not_evaluated_again_until_it_gets_more_steps(
    world: Callable[..., World],
) -> None:
    ending = {"num_steps": 1, "evaluation": {"num_tasks": 1}}

    def after_rows(here: World) -> list[int]:
        rows = read_metrics(here.settings.run_dir / "metrics.jsonl")
        return [row["train_step"] for row in rows if row.get("label") == "after_greedy"]

    here = world(**ending)
    here.offer("a", "b")
    await here.run()
    result = here.job.state.result()["evaluations"]
    again = after(here, world(**ending))
    await again.run()
    assert again.job.state.result()["evaluations"] == result
    assert after_rows(again) == [1]  # and the reader of a restored run still has it
    more = after(again, world(**ending | {"num_steps": 2}))
    more.offer("c", "d")
    await more.run()
    assert after_rows(more) == [1, 2]
