"""Bands around evaluations, and the number of samples at a point of a curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialoop_ops.console.answers import bands_of, names_of, num_samples_of, points_of
from dialoop_ops.runs import RunIndex
from dialoop_ops.runs.intervals import wilson_interval

MEAN = "evaluation/running/mean_reward"


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0 / 20, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_published_one(share, count, low, high):
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=5e-5)


def write_run(folder: Path) -> RunIndex:
    folder.mkdir()
    rows = [
        {"kind": "evaluation", "label": "running", "mean_reward": reward, "num_trajectories": 20}
        | {"time": float(step), "train_step": step, "lineage": "main", "policy_version": step}
        for step, reward in ((0, 0.0), (2, 0.5), (4, 1.5))
    ]
    rows.append(
        {"kind": "train", "reward": 0.5, "time": 9.0, "train_step": 3}
        | {"lineage": "main", "policy_version": 4}
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = [
        {"outcome": outcome, "train_step": step, "trajectory_id": f"{number}", "reward": 1.0}
        | {"messages": [], "turns": [], "sequences": [], "failures": [], "label": "training"}
        for number, (step, outcome) in enumerate(
            [(1, "trained")] * 3 + [(2, "trained")] * 2 + [(2, "uniform_reward"), (4, "trained")]
        )
    ]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trained))
    index = RunIndex(folder)
    index.catch_up()
    return index


def test_evaluations_have_bands_and_other_series_have_none(tmp_path):
    index = write_run(tmp_path / "run")
    bands = bands_of(index, MEAN)
    assert bands is not None
    lows, highs = bands
    assert lows[:2] == pytest.approx([0.0, wilson_interval(0.5, 20)[0]], abs=1e-12)
    assert highs[0] == pytest.approx(0.1611, abs=5e-5)
    assert (lows[2], highs[2]) == (None, None)  # a mean reward that is no share
    assert bands_of(index, "train/reward") is None
    assert bands_of(index, "evaluation/running/num_trajectories") is None
    index.close()


def test_samples_are_the_trained_trajectories_up_to_a_step(tmp_path):
    index = write_run(tmp_path / "run")
    assert num_samples_of(index, index.points(MEAN)) == [0, 5, 6]
    assert num_samples_of(index, index.points("train/reward")) == [5]
    index.close()


def test_lengths_trained_stand_beside_those_generated_and_tokens_have_a_rate(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    steps = [
        {"kind": "train", "reward": 0.5, "time": time, "train_step": step}
        | {"lineage": "main", "policy_version": step, "num_trained_tokens": 300 * step}
        | {"lease_s": 1.0, "train_s": 1.5, "publish_s": 0.5}
        # The publish of the third step ran beside another step.
        for step, time in ((1, 7.0), (2, 10.5), (3, 12.5))
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    played = [(1, "trained", 4), (1, "trained", 8), (1, "truncated", 60), (2, "stale", 5)]
    played += [(1, "evaluation", 900)]
    rows = []
    for number, (step, outcome, length) in enumerate(played):
        segment = {"start": 0, "length": length, "source": "MODEL", "lineage": "main"}
        sequence = {"token_ids": [1] * length, "segments": [segment | {"policy_version": 0}]}
        rows.append(
            {"outcome": outcome, "train_step": step, "trajectory_id": f"{number}", "reward": 1.0}
            | {"messages": [], "turns": [], "failures": [], "label": "training"}
            | {"sequences": [sequence]}
        )
    (run_dir / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = RunIndex(run_dir)
    index.catch_up()

    def curve(name):
        return [(point.train_step, point.value) for point in points_of(index, name)]

    made = {"lengths/generated", "lengths/trained", "throughput/trained_tokens_per_s"}
    assert made <= set(names_of(index))
    assert curve("lengths/generated") == [(1, 24.0), (2, 5.0)]
    assert curve("lengths/trained") == [(1, 6.0)]  # step 2 trained none
    assert curve("throughput/trained_tokens_per_s") == [(1, 100.0), (2, 200.0), (3, 450.0)]
    assert curve("train/reward") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    index.close()


def test_the_evaluations_of_a_run_are_one_curve_with_a_band(tmp_path):
    index = write_run(tmp_path / "run")
    row = {"kind": "evaluation", "num_trajectories": 9, "time": 10.0, "lineage": "main"}
    with (index.run_dir / "metrics.jsonl").open("a") as file:
        for label, step, reward in (("before_sampled", 0, 0.25), ("after_sampled", 5, 0.75)):
            file.write(
                json.dumps(row | {"label": label, "train_step": step, "mean_reward": reward})
            )
            file.write("\n")
    index.catch_up()
    assert "heldout/sampled" in names_of(index)
    assert "heldout/greedy" not in names_of(index)
    points = points_of(index, "heldout/sampled")
    rewards = [(point.train_step, point.value) for point in points]
    assert rewards == [(0, 0.25), (0, 0.0), (2, 0.5), (4, 1.5), (5, 0.75)]
    bands = bands_of(index, "heldout/sampled")
    assert bands is not None
    ends = list(zip(*bands, strict=True))
    assert ends[0] == wilson_interval(0.25, 9)
    assert ends[3] == (None, None)  # 1.5 is no share
