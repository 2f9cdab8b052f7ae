"""A stack that `dialoop up --detach` starts: its status, the SDK on it, and its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from dialoop import BlockingDialoop, SamplingParams
from dialoop.running_stacks import find_stack

from tests.support.stack_jobs import wait_for

ROOT = Path(__file__).parents[2]
# A whole job; but `up` serves it and nothing else, so the tiny model stays as it was made.
CONFIG = """
run = "served"
engine = "transformers"
store = "memory"
[warm_start]
num_steps = 100
[train]
num_steps = 50
"""


def dialoop(*words: str) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", "dialoop_ops.cli.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=environment
    )


def text_at(url: str) -> str:
    """What a page answers; empty while nothing listens there yet."""
    try:
        with urllib.request.urlopen(url) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def rows_of(run_dir: Path) -> set[str]:
    """What a run has done so far, by its metrics."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["kind"] for line in lines}


@pytest.mark.heavy(reason="starts a stack and seven commands, half a minute")
@pytest.mark.timeout(300)
def test_a_detached_stack_is_used_and_stopped_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(CONFIG)
    started = dialoop("up", "job.toml", "--detach", "--json")
    try:
        assert started.returncode == 0, started.stderr
        announced = json.loads(started.stdout)
        assert announced["run_dir"] == "runs/served"
        assert find_stack(Path("runs/served")).addresses == announced["addresses"]
        again = dialoop("up", "job.toml", "--detach")
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        # Without a name `down` means the run called "default", and this one goes on.
        assert dialoop("down").returncode == 1
        status = dialoop("status")
        assert status.returncode == 0, status.stdout
        assert status.stdout.count(" serving") == 6
        assert "0 of 0 train steps" in status.stdout
        with BlockingDialoop.of_run("runs/served") as connection:
            task = connection.task(
                "arithmetic", "22+28", split="heldout", sampling=SamplingParams(max_new_tokens=8)
            )
            trajectory = connection.play(task)
        assert trajectory.failures == ()
        assert trajectory.num_model_tokens > 0
        played = dialoop("play", "arithmetic", "--run", "served", "--max-new-tokens", "8")
        assert played.returncode == 0, played.stderr
        assert rows_of(Path("runs/served")) == {"publish"}
        assert "groups: 0 playing, 0 unscored, 0 scored" in dialoop("status").stdout
        (console,) = re.findall(r"console (http://\S+/)", status.stdout)
        wait_for(lambda: "served" in text_at(f"{console}api/runs"), 60.0)
    finally:
        stopped = dialoop("down", "served", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout) == {"run_dir": "runs/served", "pid": announced["pid"]}
    assert find_stack(Path("runs/served")) is None
    assert not Path("runs/served/stack.json").exists()


def test_a_stack_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('engine = "nope"\n')
    done = dialoop("up", "job.toml", "--detach")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "engine" in done.stderr


def test_a_service_that_is_gone_is_one_sentence_and_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = dialoop("play", "arithmetic", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:1 is not reachable" in done.stderr
