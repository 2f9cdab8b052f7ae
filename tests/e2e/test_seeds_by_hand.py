"""Three seeds by one command, branches from step 20, and their comparison by plain formulas."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SEEDS, FROM_STEP, MORE_STEPS = (0, 1, 2), 20, 4
CONFIG = f"""
run = "tiny"
engine = "transformers"
store = "memory"
console = false
[collector]
group_size = 4
max_new_tokens = 12
[train]
num_steps = {FROM_STEP}
groups_per_train_step = 4
learning_rate = 3e-4
[warm_start]
num_steps = 150
batch_size = 64
[evaluation]
num_tasks = 32
every = 0
[gates]
rescoring_s = 0
"""
EVALUATIONS = {
    "heldout_greedy_before": ("before_greedy", "mean_reward"),
    "heldout_greedy_after": ("after_greedy", "mean_reward"),
    "heldout_sampled_before": ("before_sampled", "mean_reward"),
    "heldout_sampled_after": ("after_sampled", "mean_reward"),
    "tool_call_rate_after": ("after_sampled", "tool_call_rate"),
}
# Half the width of a 95 % interval is t standard errors. For two degrees of freedom the t
# distribution has a closed form, 0.95 = t / sqrt(2 + t^2).
T_OF_TWO = 0.95 * math.sqrt(2 / (1 - 0.95**2))


def dialoop(*words: str) -> str:
    paths = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    ended = subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def figures_of(run: str) -> dict[str, float]:
    """What a run did, counted in its metrics.jsonl."""
    lines = Path(f"runs/{run}/metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if row["kind"] == "train"]
    evaluations = {row["label"]: row for row in rows if row["kind"] == "evaluation"}
    figures = {name: evaluations[label][key] for name, (label, key) in EVALUATIONS.items()}
    return {
        **figures,
        "heldout_sampled_gain": figures["heldout_sampled_after"]
        - figures["heldout_sampled_before"],
        "num_train_steps": len(steps),
        "num_trained_tokens": sum(row["num_trained_tokens"] for row in steps),
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error s / sqrt(n) with s^2 = sum (x - mean)^2 / (n - 1)."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def share_within(t: float, freedom: float) -> float:
    """P(|T| < t), with the density of Student's t summed by Simpson's rule."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    num = 20_000
    heights = [
        (1 + (t * place / num) ** 2 / freedom) ** (-(freedom + 1) / 2) for place in range(num + 1)
    ]
    area = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return 2 * scale * area * t / num / 3


def assert_interval(cell: dict[str, Any], values: Sequence[float]) -> None:
    """The interval of three values by Student's t with two degrees of freedom."""
    mean, error = mean_and_error(values)
    hand = (mean, mean - T_OF_TWO * error, mean + T_OF_TWO * error)
    assert (cell["mean"], cell["low"], cell["high"]) == pytest.approx(hand, rel=1e-9, abs=1e-12)
    assert cell["num_values"] == len(values)


def assert_welch(cell: dict[str, Any], values: Sequence[float], others: Sequence[float]) -> None:
    """The difference of two means of different seeds, and Welch's interval."""
    (mean, error), (other, other_error) = mean_and_error(values), mean_and_error(others)
    assert cell["mean"] == pytest.approx(mean - other, rel=1e-9)
    assert (cell["low"] + cell["high"]) / 2 == pytest.approx(cell["mean"], rel=1e-9)
    a, b = error**2, other_error**2
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(others) - 1))
    t = (cell["high"] - cell["mean"]) / math.sqrt(a + b)
    assert share_within(t, freedom) == pytest.approx(0.95, abs=1e-6)


@pytest.mark.heavy(reason="trains six tiny jobs, four to six minutes")
@pytest.mark.timeout(1800)
def test_seeds_branches_and_their_comparison_equal_a_hand_computation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(CONFIG)
    seeds = ",".join(map(str, SEEDS))
    dialoop("train", "job.toml", "--seeds", seeds)
    branch = ["--from", f"tiny-seed-0@{FROM_STEP}", "--run", "branch", "--set", "train.loss=dapo"]
    more = ["--set", f"train.num_steps={MORE_STEPS}"]
    dialoop("train", "job.toml", *branch, *more, "--seeds", seeds)

    runs = [f"tiny-seed-{seed}" for seed in SEEDS]
    branches = [f"branch-seed-{seed}" for seed in SEEDS]
    figures = {run: figures_of(run) for run in (*runs, *branches)}
    # A branch starts from the policy that its source ended with, so greedy answers are the same.
    for run in branches:
        before, after = figures[run]["heldout_greedy_before"], figures[runs[0]]
        assert before == after["heldout_greedy_after"]
        mark = json.loads(Path(f"runs/{run}/run.json").read_text("utf-8"))
        assert mark["config"]["train"]["loss"] == "dapo"
        assert mark["started_with"]["branch_of"]["train_step"] == FROM_STEP
    assert [figures[run]["num_train_steps"] for run in runs] == [FROM_STEP] * len(SEEDS)
    # Seeds differ in what they learned, or the intervals below would have no width.
    assert len({figures[run]["heldout_sampled_after"] for run in runs}) > 1

    compared = json.loads(dialoop("compare", *runs, *branches, "--json"))
    for variant, names in zip(compared["variants"], (runs, branches), strict=True):
        assert variant["runs"] == names
        for figure in figures[names[0]]:
            assert_interval(variant["means"][figure], [figures[name][figure] for name in names])
    (difference,) = compared["differences"]
    for figure in figures[runs[0]]:
        pairs = zip(branches, runs, strict=True)
        assert_interval(
            difference[figure], [figures[b][figure] - figures[r][figure] for b, r in pairs]
        )

    # Without the third branch the seeds are not the same, so nothing can be paired.
    compared = json.loads(dialoop("compare", *runs, *branches[:2], "--json"))
    (difference,) = compared["differences"]
    for figure in ("num_trained_tokens", "heldout_sampled_gain"):
        sides = ([figures[run][figure] for run in names] for names in (branches[:2], runs))
        assert_welch(difference[figure], *sides)
