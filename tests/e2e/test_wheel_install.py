"""The wheels alone, in a clean environment outside the repository: play, train and record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = "replay,inference,scorer,trainer,stack"

pytestmark = [
    pytest.mark.heavy(reason="installs torch and all services from PyPI, then trains"),
    pytest.mark.timeout(3600),
]

JOB = """
run = "recorded"
engine = "transformers"
store = "memory"
[environment]
agent = "asks:ask"
[collector]
group_size = 4
[train]
num_steps = 1
groups_per_train_step = 2
pipeline_depth = 0
[evaluation]
num_tasks = 0
"""

AGENT = """
import itertools, json, urllib.request

turns = itertools.count()

def ask(task, connection):
    messages = [{"role": "user", "content": "1+1"}]
    body = {"model": connection.model, "max_tokens": 4, "messages": messages}
    request = urllib.request.Request(
        connection.base_url + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]
    return next(turns) % 2
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheels, and a folder that knows nothing of the repository."""

    programs: Path
    folder: Path

    def run(self, *words: str, typed: str = "") -> str:
        """Run the command `dialoop` and return what it printed."""
        variables = {
            k: v for k, v in os.environ.items() if k[:6] != "PYTHON" and k[:7] != "DIALOOP"
        }
        done = subprocess.run(
            [str(self.programs / "dialoop"), *words],
            cwd=self.folder,
            env=variables,
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def clean() -> Iterator[Installed]:
    # Gigabytes: pytest would keep those of the last three runs.
    with tempfile.TemporaryDirectory(prefix="dialoop-wheels-") as made:
        place = Path(made)
        subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
        programs, folder = place / "venv" / "bin", place / "folder"
        pip = [str(programs / "python"), "-m", "pip"]
        build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(place), "./client", "."]
        subprocess.run(build, cwd=ROOT, check=True)
        (sdk,), (services,) = place.glob("dialoop-*.whl"), place.glob("dialoop_services-*.whl")
        subprocess.run([*pip, "install", str(sdk), f"{services}[{EXTRAS}]"], check=True)
        (folder / "services").mkdir(parents=True)
        (folder / "services" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
        yield Installed(programs, folder)


def test_the_machine_is_ready(clean: Installed) -> None:
    assert "Training can start here" in clean.run("doctor")


def test_an_episode_is_played(clean: Installed) -> None:
    assert "reward" in clean.run("play", "arithmetic", typed="Result=1<submit>\n")


def test_an_environment_is_written_and_checked(clean: Installed) -> None:
    clean.run("env", "new", "mine")
    assert "mine" in clean.run("env", "check", "mine:environment")


def test_an_agent_is_recorded_and_trained(clean: Installed) -> None:
    (clean.folder / "job.toml").write_text(JOB)
    (clean.folder / "asks.py").write_text(AGENT)
    assert "no mistake found" in clean.run("config", "check", "job.toml")
    clean.run("train", "job.toml")
    run_dir = clean.folder / "runs" / "recorded"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trajectories"]["trained"] >= 4
    assert "assistant" in clean.run("show", "runs/recorded")
