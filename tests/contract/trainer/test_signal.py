"""Train steps are whole: groups that teach nothing are replaced, and are no train steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from dialoop.trajectory import Group

from tests.support.loop.rl_loop import Outcome, learnable, run_loop
from tests.support.loop.virtual_time import run_virtually

NUM_STEPS, SIZE = 6, 4


def sparse(share_with_signal: float, seed: int = 0):
    """Advantages of which most groups have none: all rewards of the group are the same."""
    chance = random.Random(seed)

    def advantages(group: Group) -> list[float]:
        if chance.random() < share_with_signal:
            return learnable(group)
        return [0.0] * group.num_trajectories

    return advantages


def run(folder: Path, **settings) -> Outcome:
    base = {"seed": 0, "num_steps": NUM_STEPS, "groups_per_train_step": SIZE}
    base |= {"num_tokens": lambda _: 4, "collector": {"group_size": 2}}
    return run_virtually(run_loop(folder, **base | settings))


@pytest.mark.parametrize("pipeline_depth", [0, 2])
def test_with_nine_uniform_groups_in_ten_every_train_step_is_whole(
    tmp_path: Path, pipeline_depth: int
):
    done = run(tmp_path, advantages=sparse(0.1), pipeline_depth=pipeline_depth)
    assert done.result["num_train_steps"] == NUM_STEPS
    assert done.rows_per_step == [SIZE * 2] * NUM_STEPS
    assert [row["num_groups_trained"] for row in done.train_rows] == [SIZE] * NUM_STEPS
    assert [row["train_step"] for row in done.train_rows] == list(range(1, NUM_STEPS + 1))
    assert all(row["num_updates"] and row["num_trained_tokens"] for row in done.train_rows)
    assert done.result["num_policy_versions"] == NUM_STEPS + 1
    assert done.training.num_groups_consumed == NUM_STEPS * SIZE
    num_uniform = done.training.num_groups_dropped["uniform_reward"]
    assert num_uniform == sum(row["num_groups_dropped"] for row in done.train_rows)
    assert num_uniform > 4 * NUM_STEPS * SIZE


def test_empty_batches_are_counted_and_raise_an_alarm_that_ends(tmp_path: Path):
    groups = iter([False] * 3 * SIZE)

    def late(group: Group) -> list[float]:
        return learnable(group) if next(groups, True) else [0.0] * group.num_trajectories

    done = run(tmp_path, advantages=late, candidates={"max_empty_batches": 2})
    assert done.rows_per_step == [SIZE * 2] * NUM_STEPS
    assert done.result["num_empty_batches"] == 3
    assert done.alarms == ["NO_SIGNAL"]
    assert "NO_SIGNAL" not in done.alarms_at_end


def test_training_without_any_signal_can_end_by_a_setting(tmp_path: Path):
    done = run(
        tmp_path, advantages=sparse(0.0), candidates={"stop_after_empty": 5, "max_empty_batches": 9}
    )
    assert done.result["num_train_steps"] == 0
    assert done.result["num_empty_batches"] == 5
    assert done.result["stopped_early"] == "5 empty batches in a row (groups: 20 uniform_reward)"
    assert done.result["gave_up"]
    assert done.rows_per_step == []
    assert done.alarms == []


def test_groups_in_hand_go_back_when_training_ends(tmp_path: Path):
    groups = iter([True, *[False] * 10_000])

    def one_with_signal(group: Group) -> list[float]:
        return learnable(group) if next(groups) else [0.0] * group.num_trajectories

    done = run(tmp_path, advantages=one_with_signal, candidates={"stop_after_empty": 2})
    assert done.result["stopped_early"]
    assert done.training.num_groups_scored >= 1
    assert done.training.num_groups_training == 0


def test_oversampling_plays_more_groups_ahead(tmp_path: Path):
    """With one batch of credits a step waits for each replacement; with four it need not."""
    seconds = {}
    for oversampling in (1.0, 4.0):
        done = run(
            tmp_path / str(oversampling),
            advantages=sparse(0.25),
            pipeline_depth=0,
            candidates={"oversampling": oversampling},
        )
        assert done.rows_per_step == [SIZE * 2] * NUM_STEPS
        assert done.stats.max_outstanding_groups == SIZE * oversampling
        seconds[oversampling] = done.virtual_s
    assert seconds[4.0] < 0.7 * seconds[1.0]
