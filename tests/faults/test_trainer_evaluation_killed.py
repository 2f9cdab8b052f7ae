"""A trainer that is killed while it evaluates: the next one evaluates anew, and all of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.replay import TaskLease
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.trajectory import Group, Purpose, Stage
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.replay.store import QueueLimits

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import (
    GROUPS_PER_STEP,
    Recorded,
    record_groups,
    recorded_world,
    trainers,
)

NUM_STEPS, NUM_TASKS, NUM_PARTIAL = 4, 4, 2
SETTINGS: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "checkpoint_every": 100,
    "evaluation": {"every": 2, "num_tasks": NUM_TASKS, "num_running_tasks": NUM_TASKS},
}


class Collector:
    """Plays evaluation tasks, but no more than `num_running` of those while training goes on."""

    def __init__(self, world: Recorded, sample: Group) -> None:
        self._world, self._sample = world, sample
        self.num_running = NUM_PARTIAL

    async def run(self) -> None:
        world = self._world
        waiting: list[TaskLease] = []
        while True:
            leased = await world.replay.lease_tasks(
                world.run, worker="c", max_tasks=64, lease_s=600, wait_s=0.05
            )
            waiting += leased.leases
            for lease in tuple(waiting):
                assert lease.task.purpose is Purpose.EVALUATION
                if lease.task.task_id.startswith("evaluation/running/"):
                    if not self.num_running:
                        continue
                    self.num_running -= 1
                waiting.remove(lease)
                group = self._play(lease)
                outcome = await world.replay.append_group(
                    world.run, Stage.EVALUATION, group, lease_id=lease.lease_id
                )
                assert not outcome.is_rejected, outcome

    def _play(self, lease: TaskLease) -> Group:
        trajectory = self._sample.trajectories[0]
        played = replace(trajectory, group_id=lease.group_id, trajectory_id=f"{lease.group_id}.0")
        return Group(group_id=lease.group_id, task=lease.task, trajectories=(played,))


async def until_counted(world: Recorded, count: str, number: int) -> None:
    """Until the queue has counted so many of its evaluations' groups or trajectories."""
    async with asyncio.timeout(300):
        while getattr((await world.replay.get_stats(world.run)).evaluation, count) < number:
            await asyncio.sleep(0.02)


async def hand_to_the_dead(world: Recorded) -> None:
    """One of the killed trainer's groups, if that has not happened by itself."""
    await world.replay.lease_groups(
        world.run, Stage.EVALUATION, worker="trainer", max_groups=1, lease_s=600
    )
    assert await world.replay.list_leases(world.run, Stage.EVALUATION, worker="trainer")


def running_rows(world: Recorded) -> list[dict[str, Any]]:
    rows = [row for row in world.metrics if row["kind"] == "evaluation"]
    return [row for row in rows if row["label"] == "running"]


@pytest.mark.heavy(reason="starts two trainers, one after the other")
@pytest.mark.timeout(900)
async def test_an_evaluation_under_way_at_a_kill_is_in_the_records_once_and_whole(
    tmp_path: Path,
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    groups = record_groups(model_dir, NUM_STEPS * GROUPS_PER_STEP)
    async with AsyncExitStack() as exits:
        environment = await exits.enter_async_context(
            serving(EnvironmentSettings(), Catalogue([arithmetic()]))
        )
        world = await exits.enter_async_context(
            recorded_world(tmp_path / "world", model_dir, ModelStore(QueueLimits()), groups)
        )
        start = exits.enter_context(trainers(are_forked=True))
        collector = Collector(world, groups[0])
        playing = asyncio.create_task(collector.run())
        exits.callback(playing.cancel)
        variables = world.environment(**SETTINGS, environment_address=environment.address)
        first = start.start(variables, world.run_dir / "log")
        before = after = 2 * NUM_TASKS  # greedy and sampled
        await first.until(lambda: len(world.train_rows) == NUM_STEPS)
        await until_counted(world, "num_groups_consumed", before + NUM_PARTIAL)
        first.kill()
        assert not running_rows(world)
        collector.num_running = 1000
        # Each is of one trajectory. What the dead one had asked for may be handed to it still.
        await until_counted(world, "num_trajectories_generated", before + NUM_TASKS)
        await hand_to_the_dead(world)
        second = start.start(variables, world.run_dir / "log")
        await second.until((world.run_dir / "trainer.json").is_file)
        second.stop()
        stats = await world.replay.get_stats(world.run)
        assert not playing.done(), playing.exception()
    (row,) = running_rows(world)
    assert (row["due_train_step"], row["train_step"]) == (2, NUM_STEPS)
    assert (row["num_trajectories"], row["num_failed"]) == (NUM_TASKS, 0)
    lines = (world.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    labels = [json.loads(line)["label"] for line in lines]
    assert labels.count("running") == NUM_TASKS
    # Every group is counted once: of the killed evaluation those that it took, and the rest as
    # abandoned, whether they lay in the queue or were handed to the dead; of the others all.
    counts = stats.evaluation
    assert counts.num_groups_dropped == {"abandoned": NUM_TASKS - NUM_PARTIAL}
    assert counts.num_groups_consumed == before + NUM_PARTIAL + NUM_TASKS + after
    assert counts.num_trajectories_generated == before + 2 * NUM_TASKS + after
    assert counts.num_open == 0
    assert [row["train_step"] for row in world.train_rows] == [1, 2, 3, 4]
