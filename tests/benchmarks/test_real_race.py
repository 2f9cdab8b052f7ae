"""The race of the real model: clocks outlive stops, and results are joined by their medians."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import race
from benchmarks.servers.real_race import InstructionReward, TrainingClock, live_seconds


class Now:
    """A clock on the wall that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def train(clock: TrainingClock, now: Now, steps: range, *, between_s: float = 50.0) -> None:
    """Train steps of 10 s with something else before each."""
    for step in steps:
        now.seconds += between_s
        clock.go_on()
        now.seconds += 10.0
        clock.reach(step)


def test_the_clock_counts_train_steps_alone_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    path, now = tmp_path / "clock.json", Now()
    train(TrainingClock(path, now=now), now, range(1, 4))
    # The newest checkpoint is of step 2: step 3 is trained, and counted, once more.
    again = TrainingClock(path, train_step=2, now=now)
    assert again.seconds == {1: 10.0, 2: 20.0}
    train(again, now, range(3, 5), between_s=1000.0)
    rows = json.loads(path.read_text("utf-8"))
    assert rows == [{"train_step": step, "wall_s": 10.0 * step} for step in range(1, 5)]
    assert TrainingClock(path, now=now).seconds == {}, "without a checkpoint all begins anew"
    with pytest.raises(RuntimeError, match="stood still"):
        again.reach(5)


def test_our_seconds_run_while_a_policy_is_live_and_leave_out_what_a_restore_took_back() -> None:
    def row(kind: str, at: float, step: int) -> dict[str, Any]:
        return {"kind": kind, "time": at, "train_step": step}

    rows = [
        row("publish", 100.0, 0),
        row("train", 109.0, 1),
        row("publish", 110.0, 1),
        row("publish", 120.0, 2),
        row("publish", 131.0, 3),
        row("restore", 900.0, 2),
        row("publish", 950.0, 2),
        row("publish", 961.5, 3),
    ]
    assert live_seconds(rows) == {0: 0.0, 1: 10.0, 2: 20.0, 3: 31.5}
    assert live_seconds([]) == {0: 0.0}
    # A stop between the checkpoint and the publish of step 4: it counts as long as the others.
    rows = [*rows[:5], row("restore", 900.0, 4), row("publish", 950.0, 4), row("publish", 960.0, 5)]
    assert live_seconds(rows) == pytest.approx({0: 0, 1: 10, 2: 20, 3: 31, 4: 124 / 3, 5: 154 / 3})


def test_an_answer_earns_what_the_environment_gives() -> None:
    reward = InstructionReward()
    tasks = reward.tasks("heldout")
    number = next(
        n
        for n, task in enumerate(tasks)
        if json.loads(task.metadata["instruction_id_list"]) == ["punctuation:no_comma"]
    )
    noun = tasks[number].metadata["topic"].split()[-1]
    long = f"There is so much to say about the {noun} that nobody ever ends."
    answers = [long, f"Well, {long}", "Nothing to say.", ""]
    assert reward([tasks[number]] * 4, answers) == pytest.approx([1.0, 0.0, 0.2, 0.0])
    reward.close()


def result(side: str, seed: int, scores: list[float], **changes: Any) -> dict[str, Any]:
    curve = [
        {"train_step": 2 * n, "wall_s": 100.0 * n, "sampled": score}
        for n, score in enumerate(scores)
    ]
    return {"side": side, "seed": seed, "options": {}, "shared": {}, "curve": curve} | changes


def test_the_report_compares_medians_of_the_seconds_to_the_target() -> None:
    ours = [result("dialoop", seed, [0.1, 0.2, 0.4][: 3 - seed]) for seed in (1, 0)]
    ours.append(result("dialoop", 2, [0.1, 0.5]))
    theirs = [result("trl", seed, [0.1, 0.1, 0.1, 0.3, 0.2]) for seed in range(3)]
    found = race.joined([*ours, *theirs], 0.3)
    # Seed 1 never came there, which is longer than the 200 s of seed 0.
    assert [run["wall_s_to_target"] for run in found["runs"]["dialoop"]] == [200.0, None, 100.0]
    assert found["median_wall_s_to_target"] == {"dialoop": 200.0, "trl": 300.0}
    assert found["over_trl"] == {"dialoop": round(200 / 300, 3)}
    assert found["runs"]["trl"][0]["train_steps_to_target"] == 6
    never = race.joined([*ours, *theirs], 0.45)
    assert never["median_wall_s_to_target"] == {"dialoop": None, "trl": None}
    assert never["over_trl"] == {"dialoop": None}


def test_runs_with_different_options_are_not_compared() -> None:
    ours = result("dialoop", 0, [0.1])
    with pytest.raises(SystemExit, match="shared"):
        race.joined([ours, result("trl", 0, [0.1], shared={"groups": 4})], 0.3)
    other = result("trl", 1, [0.1], options={"threads": 1})
    with pytest.raises(SystemExit, match="options"):
        race.joined([ours, result("trl", 0, [0.1]), other], 0.3)


def test_both_sides_train_what_the_real_models_config_says() -> None:
    job = race.job_of(["collector.max_new_tokens=8"], seed=3, num_steps=5)
    assert (job.seed, job.train.num_steps, job.train.keep_policies) == (3, 5, 0)
    assert job.evaluation.num_tasks == job.evaluation.every == 0
    assert race.shared_by(job) == {
        "groups": 8,
        "group_size": 8,
        "max_new_tokens": 8,
        "temperature": 1.0,
        "learning_rate": 2e-5,
    }


def test_scores_outlive_a_stop_and_the_deadline_leaves_the_rest_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "sampled_score", lambda _, weights, **__: float(weights.stem) / 10)
    weights = {step: tmp_path / f"{step}.safetensors" for step in (0, 1, 2, 4)}
    for path in weights.values():
        path.touch()

    def side(deadline: float) -> race.Side:
        job = race.job_of([], seed=0, num_steps=4)
        return race.Side(
            name="trl", folder=tmp_path, job=job, every=2, deadline=deadline, options={}
        )

    assert race.score_kept(side(0.0), weights) == {}
    assert race.score_kept(side(float("inf")), weights) == {0: 0.0, 2: 0.2, 4: 0.4}
    assert [path.name for path in weights.values() if path.is_file()] == [
        "0.safetensors",
        "4.safetensors",
    ]
    assert race.score_kept(side(0.0), weights) == {0: 0.0, 2: 0.2, 4: 0.4}
