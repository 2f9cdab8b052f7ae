"""`[collector] total_turns`: the collector begins no more, and training ends with what is left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from dialoop import testing
from dialoop.trajectory import Purpose
from dialoop.waits import current_waits
from dialoop_ops.stack.report.summary import read_collectors
from dialoop_services.collector.__main__ import collect
from dialoop_services.collector.collector import Collector
from dialoop_services.collector.counters import Counters, path_of_counts, read_training_turns

from tests.support.collector_world import ScriptedPolicy, adds_up, make_tasks, world
from tests.support.loop.rl_loop import run_loop
from tests.support.loop.virtual_time import run_virtually
from tests.support.waiting import PATIENCE_S, until


@pytest.mark.parametrize(
    ("total_turns", "num_played", "num_steps"),
    # Groups of two turns, and four groups a train step. A begun group is played to its end.
    [(20, 20, 2), (15, 16, 2), (6, 6, 0)],
)
def test_training_ends_with_the_whole_batches_of_the_turns(
    tmp_path: Path, total_turns: int, num_played: int, num_steps: int
) -> None:
    done = run_virtually(
        run_loop(
            tmp_path,
            seed=0,
            num_steps=9,
            groups_per_train_step=4,
            num_tokens=lambda _: 4,
            collector={"group_size": 2, "total_turns": total_turns},
            total_turns=total_turns,
        )
    )
    assert done.counters["training"]["num_turns"] == num_played
    assert done.training.num_trajectories_generated == num_played
    assert done.result["num_train_steps"] == num_steps
    assert done.result["stopped_early"] == f"total_turns = {total_turns} turns were played"
    assert done.training.num_groups_dropped[f"turns_spent_{total_turns}"] > 0
    assert (done.training.num_tasks_offered, done.training.num_groups_leased) == (0, 0)
    assert done.training.num_groups_scored == num_played // 2 - 4 * num_steps
    assert adds_up(done.training)


async def test_evaluations_are_played_when_no_training_turn_is_left() -> None:
    async with world() as w:
        await w.allow(9)
        async with w.collecting(ScriptedPolicy(), total_turns=4) as counters:
            await w.until(lambda c: "turns_spent_4" in c.num_groups_dropped)
            tasks = await make_tasks(w, 3, purpose=Purpose.EVALUATION)
            await w.replay.offer_tasks("r", tasks)
            async with asyncio.timeout(PATIENCE_S):
                while counters.to_json()["evaluation"]["num_groups_appended"] < 3:
                    await asyncio.sleep(0.02)
            await w.until(lambda c: c.num_tasks_offered == 0)
    assert counters.to_json()["training"]["num_turns"] == 4


async def test_a_higher_limit_or_none_goes_on_with_a_queue_that_reached_a_lower_one() -> None:
    async with world() as w:
        await w.allow(9)
        for total_turns, num_turns in ((4, 4), (8, 8), (-1, 12)):
            async with w.collecting(ScriptedPolicy(), total_turns=total_turns) as counters:
                counters._num_turns_before = num_turns - 4
                async with asyncio.timeout(PATIENCE_S):
                    while counters.num_training_turns < num_turns:
                        await asyncio.sleep(0.02)
                if total_turns > 0:
                    name = f"turns_spent_{total_turns}"
                    await w.until(lambda c, name=name: name in c.num_groups_dropped)


def test_a_collector_that_is_started_again_goes_on_counting(tmp_path: Path) -> None:
    num_turns = len(testing.trajectory().turns)
    for worker in ("a", "b"):
        counters = Counters(worker, path=path_of_counts(tmp_path, worker))
        counters.count_trajectory(testing.trajectory(), Purpose.TRAINING)
        counters.save()
    assert read_training_turns(tmp_path) == 2 * num_turns > 0
    again = Counters("c", num_turns_before=8)
    assert again.num_training_turns == 8
    # The file holds its own turns alone, since summaries add the files up.
    assert json.loads(json.dumps(again.to_json()))["training"]["num_turns"] == 0
    assert read_training_turns(None) == 0


async def test_whatever_is_in_the_queue_has_been_counted_on_disk(tmp_path: Path) -> None:
    """So that a collector which is killed at any time goes on with all that it has played."""
    async with world() as w:
        await w.allow(9)
        async with w.collecting(ScriptedPolicy(), total_turns=12, run_dir=tmp_path):
            # Nothing writes the file here from time to time, as the process would.
            await w.until(lambda c: c.num_trajectories_generated > 0)
            num_appended = 0
            while num_appended < 12:
                num_appended = (await w.training()).num_trajectories_generated
                assert num_appended <= read_training_turns(tmp_path) <= 12


async def test_a_collector_started_again_under_its_name_keeps_what_it_counted(
    tmp_path: Path,
) -> None:
    stopping = asyncio.Event()
    stopping.set()
    for num_processes in range(3):
        assert read_training_turns(tmp_path) == num_processes
        counters = Counters("c", path=path_of_counts(tmp_path, "c"))
        counters.count_trajectory(testing.trajectory(), Purpose.TRAINING)
        idle = cast("Collector", SimpleNamespace(run=asyncio.Event().wait))
        await collect(idle, counters, stopping)
    counted = [c["training"]["num_trajectories"] for c in read_collectors(tmp_path)]
    assert counted == [1, 1, 1]


async def test_counts_that_a_full_disk_refuses_are_saved_once_it_has_room(tmp_path):
    counters = Counters("c1", path=tmp_path / "counts.json")
    draft = tmp_path / ".counts.json.tmp"
    draft.mkdir()  # so that writing fails, for root too
    saving = asyncio.create_task(counters.save_at_last(interval_s=0.01))
    await until(lambda: [w for w in current_waits.get().current() if w.target == "disk"])
    assert not saving.done()
    draft.rmdir()
    await saving
    assert (tmp_path / "counts.json").is_file()
