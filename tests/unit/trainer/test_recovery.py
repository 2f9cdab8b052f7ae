"""A restarted trainer recovers the steps of its journal, or logs which it cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.replay import GroupLease, ReturnItem
from dialoop.sequences import PolicyVersion
from dialoop_ops.stack.report.plot import read_metrics
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.recovery.checkpoint import JournalEntry

from tests.support.trainer_world import (
    FIRST,
    Killed,
    World,
    after,
    killed_after,
    lease,
    until_extended,
    worlds,
)
from tests.support.waiting import until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, num_steps=3, checkpoint_every=100) as make:
        yield make


def kept_rows(here: World) -> list[dict[str, Any]]:
    rows = read_metrics(here.settings.run_dir / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "train"]


async def test_what_was_trained_since_the_checkpoint_is_trained_again_and_stays_published(
    world: Callable[..., World],
) -> None:
    here = world()
    await killed_after(here, "ab", "cd")
    again = after(here, world(), in_work="ef")
    again.offer("e", "f")
    await again.run()
    assert again.learner.trained == [4, 4, 4]
    assert again.publisher.published == [("main-3", 2), ("main-4", 3)]
    assert again.replay.given_back == ["lease-e", "lease-f"]
    assert again.replay.acknowledged == [f"lease-{name}" for name in "abcdef"]
    assert [row["train_step"] for row in kept_rows(again)] == [1, 2, 3]


async def test_all_leases_to_recover_are_held_before_the_first_step_and_as_long_as_it_takes(
    world: Callable[..., World],
) -> None:
    here = world()
    await killed_after(here, "ab", "cd")
    again = after(here, world(num_steps=2, lease_s=0.03))
    extended, reopen = again.replay.extended, again.replay.reopen_leases
    before: list[int] = []

    async def watch(*args: Any, **options: Any) -> Any:
        before.append(len(extended))
        return await reopen(*args, **options)

    again.replay.reopen_leases = watch  # type: ignore[method-assign]
    again.learner.while_training = lambda: until_extended(again, 2)
    await again.run()
    assert before[0] == 1
    assert before[1] > 1
    everything = tuple(f"lease-{name}" for name in "abcd")
    assert extended[: before[1]] == [everything] * before[1]


async def test_recovered_steps_are_saved_so_that_the_next_restart_does_not_repeat_them(
    world: Callable[..., World],
) -> None:
    here = world()
    await killed_after(here, "ab", "cd")
    again = after(here, world())
    await killed_after(again)
    assert again.replay.acknowledged == [f"lease-{name}" for name in "abcd"]
    assert not again.job.checkpointer.journal.entries()
    third = after(again, world())
    third.offer("e", "f")
    await third.run()
    assert third.learner.trained == [4]
    assert third.publisher.published == [("main-3", 2), ("main-4", 3)]


async def test_a_refused_batch_is_not_repeated_after_a_kill(world: Callable[..., World]) -> None:
    here = world()
    refuse_second(here)
    await killed_after(here, "ab", "cd")
    again = after(here, world(num_steps=2))
    again.offer("e", "f")
    await again.run()
    assert again.learner.trained == [4, 4]  # the first batch, and the third
    assert again.publisher.published == [("main-2", 1), ("main-3", 2)]
    batches = [row for row in again.rows if row["kind"] in ("train", "refused")]
    assert [(row["kind"], row["train_step"], row["policy_version"]) for row in batches] == [
        ("train", 1, 2),
        ("refused", 1, 2),
        ("train", 2, 3),
    ]
    lines = (here.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert outcomes == ["trained"] * 4 + ["refused"] * 4 + ["trained"] * 4


def refuse_second(here: World) -> None:
    """Let the learner refuse every update of its second batch."""
    train_step = here.learner.train_step

    def refuse(rows: Any) -> Any:
        report = train_step(rows)
        is_second = len(here.learner.trained) == 2
        return replace(report, num_updates=1 - is_second, num_refused=int(is_second))

    here.learner.train_step = refuse  # type: ignore[method-assign]


async def test_only_what_was_in_work_at_the_kill_is_returned_as_a_failure(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=4)
    await killed_after(here, "ab", "cd")
    again = after(here, world(num_steps=1), lost="a", in_work="e")
    returned: list[ReturnItem] = []

    async def give_back(run: str, items: list[ReturnItem]) -> None:
        returned.extend(items)

    again.replay.give_back = give_back  # type: ignore[method-assign]
    again.offer("x", "y")
    await again.run()
    assert {item.lease_id: item.failed for item in returned} == {
        "lease-b": False,
        "lease-c": False,
        "lease-d": False,
        "lease-e": True,
    }


async def test_where_a_group_is_gone_the_run_goes_on_from_there_in_a_new_lineage(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=4)
    await killed_after(here, "ab", "cd", "ef")
    again = after(here, world(num_steps=3), lost="d")
    again.offer("x", "y")
    again.offer("v", "w")
    await again.run()
    assert again.publisher.published == [("main.1-2", 1), ("main.1-3", 2), ("main.1-4", 3)]
    assert [row["lineage"] for row in kept_rows(again)] == ["main", "main.1", "main.1"]
    # Saved at once: the journal has steps that cannot be recovered.
    assert again.replay.acknowledged[:2] == ["lease-a", "lease-b"]


async def test_weights_that_come_out_other_than_published_go_back_to_the_checkpoint(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(num_steps=3)
    await killed_after(here, "ab", "cd")
    pointer = here.settings.run_dir / "policies" / "latest.json"
    pointer.parent.mkdir()
    pointer.write_text(
        json.dumps(
            {"lineage": "main", "number": 3, "path": "main-3/model.safetensors", "sha256": "other"}
        )
    )
    again = after(here, world(num_steps=1))
    again.offer("x", "y")
    await again.run()
    assert "Recovered weights differ from the published ones." in caplog.text
    assert again.publisher.published == [("main.1-1", 0), ("main.1-2", 1)]
    assert again.replay.given_back == [f"lease-{name}" for name in "abcd"]
    assert [row["lineage"] for row in kept_rows(again)] == ["main.1"]


async def test_a_step_that_was_killed_before_its_row_was_written_gets_it(
    world: Callable[..., World],
) -> None:
    here = world()
    here.offer("a", "b")
    publish = here.publisher.publish

    async def kill(version: PolicyVersion, **options: Any) -> Any:
        if version.number == 2:
            raise Killed
        return await publish(version, **options)

    here.publisher.publish = kill  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    assert not kept_rows(here)
    again = after(here, world(num_steps=1))
    await again.run()
    assert again.publisher.published == [("main-2", 1)]
    assert [row["train_step"] for row in kept_rows(again)] == [1]


async def test_a_step_that_was_killed_while_it_was_written_down_is_written_down_once(
    world: Callable[..., World],
) -> None:
    here = world()
    here.offer("a", "b")
    metric = here.records.metric

    def kill(kind: str, **values: Any) -> None:
        if kind == "train":
            raise Killed
        metric(kind, **values)

    here.records.metric = kill  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    # The kill cut off the last of the lines, too.
    path = here.settings.run_dir / "trajectories.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20], "utf-8")
    again = after(here, world(num_steps=1))
    await again.run()
    assert path.read_text("utf-8").splitlines(keepends=True) == lines
    assert [row["train_step"] for row in kept_rows(again)] == [1]


async def test_a_drop_that_a_kill_cut_short_is_made_up_for(world: Callable[..., World]) -> None:
    here = world(max_staleness=0, pipeline_depth=0)
    here.replay.batches.append(
        lambda: [lease("a", FIRST), lease("b", replace(FIRST, lineage="other"))]
    )

    async def kill(*_: Any) -> Any:
        raise Killed

    here.replay.drop = kill  # type: ignore[method-assign, assignment]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = after(here, world(num_steps=1), in_work="a")
    again.replay.batches.append(lambda: [lease("a", FIRST)])
    again.offer("c")
    await again.run()
    assert again.replay.given_back == ["lease-a"]
    assert again.replay.dropped == {"lease-b": "stale"}
    assert len(again.learner.trained) == 1


@pytest.mark.parametrize("are_gone", [True, False])
async def test_groups_dropped_before_a_kill_count_in_the_row_of_the_next_step(
    world: Callable[..., World], tmp_path: Path, are_gone: bool
) -> None:
    def uniform(*names: str) -> list[GroupLease]:
        return [lease(name, FIRST, advantages=(0.0, 0.0)) for name in names]

    settings = {"num_steps": 1, "pipeline_depth": 0}
    undisturbed = World(tmp_path / "undisturbed", **settings)
    here = world(**settings)
    for each in (undisturbed, here):
        each.replay.batches += [lambda: uniform("u"), lambda: uniform("v", "w")]
    here.replay.batches.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = after(here, world(**settings), lost="uvw" if are_gone else "")
    for each in (undisturbed, again):
        each.offer("a", "b", policy=FIRST)
        await each.run()
    undisturbed.records.close()
    (row,), (own,) = kept_rows(undisturbed), kept_rows(again)
    assert own["num_groups_dropped"] == row["num_groups_dropped"] == 3
    assert [own[name] for name in own if "reward" in name] == [
        row[name] for name in row if "reward" in name
    ]
    assert again.job.state.num_empty_batches == undisturbed.job.state.num_empty_batches == 1


async def test_publishes_and_evaluations_since_the_checkpoint_are_remembered(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, evaluation={"every": 1, "num_tasks": 1, "stop_without_gain": 2})
    here.evaluator.rewards = [0.5]
    await killed_after(here, "ab")
    here.job.schedule.mark_evaluated(1, judged=0.25)
    await here.job.versions.publish_next()
    again = after(here, world(num_steps=1, evaluation={"num_tasks": 1, "stop_without_gain": 2}))
    await again.run()
    progress = again.job.state
    assert again.publisher.published[0] == ("main-3", 1)
    assert progress.num_policy_versions == 3
    assert progress.best_evaluation == here.job.state.best_evaluation
    assert progress.num_evaluations_without_gain > 0


async def test_the_first_policy_is_never_evaluated_with_steps_in_its_weights(
    world: Callable[..., World],
) -> None:
    evaluated: list[tuple[str, int]] = []

    def watch() -> World:
        made = world(evaluation={"num_tasks": 1})
        evaluate = made.evaluator.evaluate

        async def note_and_evaluate(plan: Any, **options: Any) -> Any:
            evaluated.append((plan.label, made.learner.weights))
            return await evaluate(plan, **options)

        made.evaluator.evaluate = note_and_evaluate  # type: ignore[method-assign]
        return made

    here = watch()
    await killed_after(here, "ab", "cd")
    again = after(here, watch())
    again.offer("e", "f")
    await again.run()
    assert evaluated == [
        *(("before_greedy", 0), ("before_sampled", 0)),
        *(("after_greedy", 3), ("after_sampled", 3)),
    ]
    result = json.loads((again.settings.run_dir / "trainer.json").read_text("utf-8"))
    assert list(result["evaluations"]) == [label for label, _ in evaluated]


async def test_a_run_started_without_evaluations_has_none_from_before(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)
    here.offer("a", "b")
    await here.run()
    again = world(num_steps=1, evaluation={"num_tasks": 1})
    again.replay.policy_version = here.job.state.policy_version
    await again.run()
    assert list(again.job.state.evaluations) == ["after_greedy", "after_sampled"]


async def test_killed_in_its_first_evaluation_a_run_has_it_all_again_of_the_first_policy(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1, evaluation={"num_tasks": 1})
    evaluate = here.evaluator.evaluate

    async def kill(plan: Any, **options: Any) -> Any:
        if plan.label == "before_sampled":
            raise Killed
        return await evaluate(plan, **options)

    here.evaluator.evaluate = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await here.run()
    again = after(here, world(num_steps=1, evaluation={"num_tasks": 1}))
    again.offer("a", "b")
    await again.run()
    assert again.publisher.published == [("main-1", 0), ("main-2", 1)]
    rows = read_metrics(here.settings.run_dir / "metrics.jsonl")
    assert [row["label"] for row in rows if row["kind"] == "evaluation"] == [
        *("before_greedy", "before_sampled", "after_greedy", "after_sampled")
    ]


async def test_a_new_checkpoint_begins_a_new_journal(world: Callable[..., World]) -> None:
    here = world(checkpoint_every=2)
    await killed_after(here, "ab", "cd")
    assert not here.job.checkpointer.journal.entries()


def test_a_line_that_a_kill_cut_short_is_not_read_and_not_built_upon(
    world: Callable[..., World],
) -> None:
    here = world()
    directory = here.settings.run_dir / "checkpoints" / "one"
    directory.mkdir(parents=True)
    (directory.parent / "latest.json").write_text('{"name": "one"}')
    (directory / "progress.json").write_text('{"format": 1}')
    journal = here.job.checkpointer.journal
    entry = JournalEntry(
        train_step=1, policy_version=FIRST, trained=("a",), dropped={"stale": ("b",)}
    )
    journal.add(entry)
    with (directory / "journal.jsonl").open("a") as file:
        file.write('{"train_step": 2, "lin')
    assert journal.entries() == (entry,)
    journal.add(replace(entry, train_step=2))
    assert [entry.train_step for entry in journal.entries()] == [1, 2]


async def test_the_first_policy_is_saved_before_anybody_hears_of_it(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=1)

    async def kill(*_: Any, **__: Any) -> Any:
        raise Killed

    here.publisher.publish = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await here.run()
    again = world(num_steps=1)
    again.replay.policy_version = FIRST
    again.offer("a", "b")
    await again.run()
    assert again.publisher.published == [("main-1", 0), ("main-2", 1)]


async def test_a_queue_that_lost_its_state_gets_the_position_in_the_data_before_a_policy(
    world: Callable[..., World],
) -> None:
    """It is where tasks are left that have not ended, not the page that is offered next."""
    here = world(num_steps=9, checkpoint_every=1)
    here.replay.cursor, here.replay.settled = "page 9", "page 7"
    await killed_after(here, "ab")
    again = world(num_steps=1, checkpoint_every=1)
    cursors: list[str] = []
    publish = again.publisher.publish

    async def record(*arguments: Any, **named: Any) -> Any:
        cursors.append(again.replay.cursor)
        return await publish(*arguments, **named)

    again.publisher.publish = record  # type: ignore[method-assign]
    await again.run()
    assert cursors == ["page 7"]


async def test_a_queue_that_loses_its_state_while_it_is_asked_for_groups_gets_its_position(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=3, checkpoint_every=1, max_staleness=9)
    here.replay.cursor = "page 7"
    here.offer("a", "b")

    def lose() -> list[Any]:
        here.replay.cursor = ""
        return []

    here.replay.batches.append(lose)
    running = asyncio.create_task(here.run())
    await until(lambda: here.publisher.announced)
    assert here.replay.cursor == "page 7"
    for names in ("cd", "ef"):
        here.offer(*names)
    await running


async def test_a_queue_that_still_knows_its_position_keeps_it(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=9, checkpoint_every=1)
    here.replay.cursor = "page 7"
    await killed_after(here, "ab")
    again = world(num_steps=1, checkpoint_every=1)
    again.replay.cursor = "page 9"
    await again.run()
    assert again.replay.cursor == "page 9"


async def test_a_group_that_returns_after_its_checkpoint_is_acknowledged_and_not_trained_again(
    world: Callable[..., World],
) -> None:
    """From a queue that lost its last seconds."""
    here = world(num_steps=2, checkpoint_every=1)
    here.offer("a", "b")
    here.offer("a", "b", prefix="again-")
    here.offer("c", "d")
    await here.run()
    assert here.learner.trained == [4, 4]
    acknowledged = here.replay.acknowledged
    assert {"again-lease-a", "again-lease-b", "lease-c", "lease-d"} <= set(acknowledged)


def test_consumed_groups_are_remembered_until_they_would_be_stale_and_longer() -> None:
    state = JobState(num_policy_versions=3, consumed_group_ids={"a": 3})
    state.num_policy_versions = 3 + 7
    state.forget_consumed(max_staleness=7)
    assert "a" in state.consumed_group_ids
    state.forget_consumed(max_staleness=None)
    assert "a" in state.consumed_group_ids
    state.num_policy_versions = 1000
    state.forget_consumed(max_staleness=7)
    assert not state.consumed_group_ids
