"""`dialoop replay-step` over all 40 train steps that a job kept, and one flipped mask bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUM_STEPS, CHANGED_STEP = 40, 23
CONFIG = f"""
run = "kept"
engine = "transformers"
store = "memory"
console = false
[collector]
group_size = 4
max_new_tokens = 24
[train]
num_steps = {NUM_STEPS}
keep_steps = {NUM_STEPS}
groups_per_train_step = 4
num_minibatches = 2
loss = "grpo"
checkpoint_every = 10
[warm_start]
num_steps = 150
batch_size = 64
[evaluation]
num_tasks = 0
[gates]
rescoring_s = 0
"""


def dialoop(*words: str, exit_code: int = 0) -> str:
    paths = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    ended = subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert ended.returncode == exit_code, ended.stderr + ended.stdout
    return ended.stdout


def mask_of(segments: list[dict[str, Any]]) -> list[bool]:
    """Whether the policy sampled each token, and so whether it is trained."""
    return [segment["source"] == "MODEL" for segment in segments for _ in range(segment["length"])]


def flip_a_mask_bit(path: Path) -> tuple[str, int]:
    """Give a turn's last sampled token to the template after it; return where that token is."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for row in rows:
        if (row["outcome"], row["train_step"]) != ("trained", CHANGED_STEP):
            continue
        segments = row["sequences"][0]["segments"]
        for sampled, after_it in pairwise(segments):
            if (sampled["source"], after_it["source"]) != ("MODEL", "TEMPLATE"):
                continue
            before = mask_of(segments)
            sampled["length"] -= 1
            after_it["start"] -= 1
            after_it["length"] += 1
            after = mask_of(segments)
            (token,) = [
                n for n, bits in enumerate(zip(before, after, strict=True)) if len(set(bits)) > 1
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            return row["trajectory_id"], token
    pytest.fail(f"no trajectory of step {CHANGED_STEP} has a token after a sampled one")


@pytest.mark.heavy(reason="trains 40 steps and repeats them, one to two minutes")
@pytest.mark.timeout(1800)
def test_40_kept_steps_are_bit_equal_and_a_flipped_mask_bit_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(CONFIG)
    dialoop("train", "job.toml")
    run_dir = Path("runs/kept")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [row["num_trained_tokens"] for row in rows if row["kind"] == "train"]
    assert len(trained) == NUM_STEPS
    assert min(trained) > 0

    equal = dialoop("replay-step", "kept", f"1..{NUM_STEPS}").splitlines()
    verdict = re.compile(r"step (\d+): equal bit for bit, \d+ values in \d+ stages")
    assert [int(verdict.fullmatch(line)[1]) for line in equal] == [*range(1, NUM_STEPS + 1)]

    trajectory_id, token = flip_a_mask_bit(run_dir / "trajectories.jsonl")
    last_equal, different = dialoop(
        "replay-step", "kept", f"{CHANGED_STEP - 1}..{CHANGED_STEP}", exit_code=1
    ).splitlines()
    assert verdict.fullmatch(last_equal)
    assert different == (
        f"step {CHANGED_STEP} differs: stage trajectories.jsonl, mask at trajectory "
        f"{trajectory_id}, sequence 0, token {token}: kept 'MODEL', repeated 'TEMPLATE'"
    )
