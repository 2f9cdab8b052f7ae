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
        [sys.executable, "-m", "dialoop.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=os.environ | {"PYTHONPATH": paths},
    )


@pytest.mark.heavy
@pytest.mark.timeout(600)
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
