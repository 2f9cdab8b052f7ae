"""Evaluations on the queue itself, in memory: none waits for ever, and none takes another's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from dialoop import testing
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import Unavailable
from dialoop.trajectory import (
    Group,
    Purpose,
    Reward,
    SamplingParams,
    Stage,
    Task,
    Trajectory,
    Turn,
)
from dialoop.v1 import trainer_service_pb2 as pb
from dialoop_services.trainer.job.evaluation import (
    EvaluationPlan,
    EvaluationResult,
    Evaluator,
    _summarise,
    judged_in,
)
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.servicer import TrainerServicer
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.waiting import PATIENCE_S


class FakeEnvironment:
    async def list_tasks(self, *_: Any, page_size: int, **__: Any) -> Any:
        refs = [SimpleNamespace(key=str(n), seed=n) for n in range(page_size)]
        return SimpleNamespace(tasks=refs, next_page_token="")


class FakeReplay:
    """Every offered task is played at once, but for those whose key is in `failing`."""

    def __init__(self, *failing: str) -> None:
        self._failing = failing
        self.ready: dict[str, Group] = {}
        self.dropped: list[str] = []
        self.held: dict[tuple[Stage, str], str] = {}
        self.num_away = 0

    def play(self, task: Task) -> None:
        if task.key not in self._failing:
            self.ready[task.task_id] = group(task)

    async def offer_tasks(self, run: str, tasks: list[Task], **_: Any) -> None:
        if self.num_away:
            self.num_away -= 1
            raise Unavailable("away")
        for task in tasks:
            self.play(task)

    async def lease_groups(self, *_: Any, task_id_prefix: str, **__: Any) -> Any:
        await asyncio.sleep(0)
        names = [name for name in self.ready if name.startswith(task_id_prefix)]
        leases = [SimpleNamespace(lease_id=name, group=self.ready[name]) for name in names]
        return SimpleNamespace(leases=leases)

    async def acknowledge(self, run: str, lease_ids: list[str]) -> None:
        for name in lease_ids:
            del self.ready[name]

    async def list_leases(self, run: str, stage: Stage, *, worker: str) -> tuple[str, ...]:
        if self.num_away:
            self.num_away -= 1
            raise Unavailable("away")
        return (self.held[stage, worker],)

    async def drop(self, run: str, lease_ids: list[str], reason: str) -> None:
        await self.acknowledge(run, lease_ids)
        self.dropped += lease_ids

    async def get_stats(self, run: str) -> Any:
        return SimpleNamespace(evaluation=SimpleNamespace(num_open=len(self.ready)))


def group(task: Task) -> Group:
    played = testing.trajectory(
        trajectory_id=task.task_id,
        group_id=f"{task.task_id}",
        task_key=task.key,
        turns=(),
        sequences=(),
    )
    return Group(group_id=f"{task.task_id}", task=task, trajectories=(played,))


def orphan() -> Task:
    name = "evaluation/before_greedy/0badcafe/1+1"
    return Task(
        task_id=name,
        environment="arithmetic",
        split="heldout",
        key="1+1",
        purpose=Purpose.EVALUATION,
        num_trajectories=1,
    )


def plan(label: str, num_tasks: int = 3) -> EvaluationPlan:
    return EvaluationPlan(
        environment="arithmetic",
        split="heldout",
        num_tasks=num_tasks,
        sampling=SamplingParams(),
        label=label,
    )


@pytest.fixture
def evaluate(tmp_path: Path) -> Iterator[Any]:
    records = RunRecords(tmp_path)

    def with_replay(replay: FakeReplay) -> Evaluator:
        return Evaluator(
            "run",
            cast("EnvironmentClient", FakeEnvironment()),
            cast("ReplayClient", replay),
            records,
        )

    yield with_replay
    records.close()


async def test_groups_that_a_killed_trainer_waited_for_do_not_hold_up_the_next_evaluation(
    evaluate: Any,
) -> None:
    replay = FakeReplay("1")
    replay.play(orphan())
    async with asyncio.timeout(PATIENCE_S):
        result: EvaluationResult = await evaluate(replay).evaluate(plan("after"), train_step=1)
    assert (result.num_trajectories, result.num_failed) == (2, 1)
    assert result.share == pytest.approx(2 / 3)
    assert (result.judged(0.9), result.judged(0.6)) == (None, result.mean_reward)
    row = {name: value for name, value in result.row().items() if name != "share"}
    assert (judged_in(row, 0.9), judged_in(row, 0.6)) == (None, result.mean_reward), "older rows"
    assert replay.dropped == [orphan().task_id]


def test_a_mean_is_over_what_counts_and_accuracy_needs_a_success_of_each() -> None:
    def played(*rewards: Reward) -> Trajectory:
        return testing.trajectory(turns=(Turn(message_start=1, num_messages=1, rewards=rewards),))

    right, wrong = (Reward(name="r", value=float(holds), success=holds) for holds in (True, False))
    short = Reward(name="short", value=1.0, weight=0.1)
    none = Reward(name="r", value=0.0, absent=True)
    result = _summarise([played(right, short), played(wrong), played(none)], 4)
    assert (result.mean_reward, result.accuracy) == (pytest.approx(0.55), 0.5)
    assert (result.num_trajectories, result.num_failed, result.share) == (2, 2, 0.5)
    unstated = Reward(name="r", value=0.3)
    assert _summarise([played(right), played(unstated)], 2).accuracy is None


async def test_groups_that_a_killed_trainer_held_are_dropped_and_no_others(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryPolicy, "wait_s", lambda *_: 0.0)
    replay = FakeReplay()
    replay.num_away = 1
    replay.play(orphan())
    replay.held = {
        (Stage.EVALUATION, "trainer"): orphan().task_id,
        (Stage.EVALUATION, "somebody"): "theirs",
        (Stage.SCORED, "trainer"): "to be recovered",
    }
    await evaluate(replay).drop_held()
    assert replay.dropped == [orphan().task_id]


async def test_evaluations_that_run_side_by_side_get_their_own_groups(evaluate: Any) -> None:
    replay = FakeReplay()
    evaluator = evaluate(replay)
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(
            evaluator.evaluate(plan("running", 3), train_step=1),
            evaluator.evaluate(plan("asked", 5), train_step=1),
        )
    assert [result.num_trajectories for result in results] == [3, 5]
    assert not replay.dropped


async def test_an_evaluation_waits_for_a_queue_that_is_away(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryPolicy, "wait_s", lambda *_: 0.0)
    replay = FakeReplay()
    replay.num_away = 3
    result = await evaluate(replay).evaluate(plan("after"), train_step=1)
    assert result.num_trajectories == 3


async def test_an_evaluation_on_request_says_how_many_succeeded_and_how_many_count() -> None:
    result = replace(_summarise([], num_episodes=4), num_trajectories=3, num_failed=1)
    nothing = cast("Any", None)
    for accuracy in (None, 0.0, 0.5):
        job = SimpleNamespace(evaluate=AsyncMock(return_value=replace(result, accuracy=accuracy)))
        servicer = TrainerServicer(TrainerSettings(), cast("Any", job), nothing, nothing, 0)
        answer = await servicer.Evaluate(pb.EvaluateRequest(), nothing)
        told = answer.accuracy if answer.HasField("accuracy") else None
        assert (told, answer.share) == (accuracy, 0.75)
