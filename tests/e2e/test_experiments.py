"""Several seeds by one command, a branch from one of them, and their comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
CONFIG = """
run = "small"
engine = "transformers"
store = "memory"
[collector]
group_size = 4
max_new_tokens = 8
[train]
num_steps = 2
groups_per_train_step = 2

[warm_start]
num_steps = 150
batch_size = 64
[evaluation]
num_tasks = 4
[gates]
rescoring_s = 0
"""


def dialoop(*words: str) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    return subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )


@pytest.mark.heavy(reason="three jobs and four evaluations, each with a stack of its own")
@pytest.mark.timeout(1800)
def test_seeds_a_branch_and_their_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(CONFIG)
    trained = dialoop("train", "job.toml", "--seeds", "3,4", "--set", "train.learning_rate=1e-4")
    assert trained.returncode == 0, trained.stderr + trained.stdout
    assert "small-seed-3, small-seed-4" in trained.stdout
    marks = {
        seed: json.loads(Path(f"runs/small-seed-{seed}/run.json").read_text()) for seed in (3, 4)
    }
    for seed, mark in marks.items():
        assert (mark["config"]["seed"], mark["config"]["train"]["learning_rate"]) == (seed, 1e-4)
        assert mark["started_with"]["origins"]["train.learning_rate"] == "--set"
        assert len(mark["started_with"]["packages"]["sha256"]) == 64

    again = dialoop("train", "job.toml", "--seeds", "3,4", "--set", "train.learning_rate=1e-4")
    assert again.stdout.count("has ended already") == 2

    words = ["--from", "small-seed-3@2", "--run", "branch", "--set", "train.loss=dapo"]
    branched = dialoop("train", "job.toml", *words)
    assert branched.returncode == 0, branched.stderr + branched.stdout
    mark = json.loads(Path("runs/branch/run.json").read_text())
    assert mark["started_with"]["branch_of"]["policy"] == "main-3"
    # Its first policy is the other run's, bit for bit.
    first, source = (
        load_file(Path(f"runs/{name}/policies/main-{n}/model.safetensors"))
        for name, n in (("branch", 1), ("small-seed-3", 3))
    )
    assert first.keys() == source.keys()
    assert all(first[name].equal(source[name]) for name in source)

    compared = dialoop("compare", "small-seed-3", "small-seed-4", "branch", "--json")
    answer = json.loads(compared.stdout)
    seeds, branch = answer["variants"]
    assert seeds["runs"] == ["small-seed-3", "small-seed-4"]
    assert branch["settings"]["train.loss"] == '"dapo"'
    steps = seeds["means"]["num_train_steps"]
    assert (steps["mean"], steps["low"], steps["high"]) == (2, 2, 2)
    check_evaluations()


def check_evaluations() -> None:
    """`dialoop eval` of both runs: the runs' own numbers, and what a kill left is used."""
    # The run's own evaluation of its last policy and `dialoop eval` are one number.
    words = ["arithmetic", "--tasks", "4", "--max-new-tokens", "8"]
    evaluated = dialoop("eval", *words, "--policy", "branch@latest", "--run", "of-branch")
    assert evaluated.returncode == 0, evaluated.stderr
    own = json.loads(Path("runs/branch/summary.json").read_text())["heldout_greedy_after"]
    results = json.loads(Path("runs/of-branch/evaluation.json").read_text())
    assert results["mean_reward"]["mean"] == own

    more = ["--samples", "4", "--policy", "small-seed-3@latest", "--against", "of-branch"]
    sampled = dialoop("eval", *words, *more, "--run", "of-seed", "--json")
    assert sampled.returncode == 0, sampled.stderr
    answer = json.loads(sampled.stdout)
    assert [len(task["rewards"]) for task in answer["tasks"].values()] == [4] * 4
    assert answer["pass_at"].keys() == {"1", "2", "4"}
    assert answer["against"]["num_better"] + answer["against"]["num_worse"] <= 4
    lines = Path("runs/of-seed/trajectories.jsonl").read_text().splitlines()

    # A kill left half a line: the rest is played again, and nothing else.
    torn = "\n".join(lines[:5]) + "\n" + lines[5][:100]
    Path("runs/of-seed/trajectories.jsonl").write_text(torn)
    again = dialoop("eval", *words, *more, "--run", "of-seed", "--json")
    assert again.returncode == 0, again.stderr
    resumed = Path("runs/of-seed/trajectories.jsonl").read_text().splitlines()
    assert (resumed[:5], len(resumed)) == (lines[:5], 16)
