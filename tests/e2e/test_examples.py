"""The examples, run as their headers say, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client" / "examples"


def run(name: str, folder: Path, timeout_s: float) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_episode_is_played(tmp_path):
    shown = run("01_play_one_episode.py", tmp_path, 60)
    assert "tool       '50<response>'" in shown
    assert "reward 1, SUBMITTED" in shown


def test_an_environment_is_written(tmp_path):
    shown = run("02_write_an_environment.py", tmp_path, 60)
    assert "looks it up: reward 1.08" in shown
    assert "Tool error: no country Atlantis" in shown


def test_a_loss_is_written_and_used(tmp_path):
    shown = run("03_write_a_loss.py", tmp_path, 110)
    assert "sampled_logprob" in shown
    assert "update 4" in shown


@pytest.mark.heavy(reason="trains for two to three minutes")
@pytest.mark.timeout(600)
def test_the_tiny_model_is_trained(tmp_path):
    shown = run("04_train_tiny.py", tmp_path, 540)
    assert "after: held-out accuracy" in shown
    assert (tmp_path / "runs" / "example-tiny" / "summary.json").is_file()


def test_every_example_says_how_to_run_it():
    for path in sorted(EXAMPLES.glob("0*.py")):
        assert f".venv/bin/python client/examples/{path.name}" in path.read_text(), path.name
