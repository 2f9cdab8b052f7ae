"""The wheels alone, in a clean environment outside the repository: play, train and record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dialoop_ops.stack.processes.ports import choose_ports

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/dialoop*/pyproject.toml"))

pytestmark = [
    pytest.mark.heavy(reason="installs torch and all services from PyPI, then trains"),
    pytest.mark.timeout(3600),
]

JOB = """
run = "{run}"
engine = "transformers"
store = "memory"
[environment]
{environment}
[collector]
group_size = 4
max_new_tokens = 8
[scorer]
kl_coefficient = 0.1
[train]
num_steps = 2
groups_per_train_step = 2
[evaluation]
num_tasks = 2
every = 0
[ports]
inference = {inference}
inference_rest = {inference_rest}
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


def clean_variables() -> dict[str, str]:
    """Variables without any that lead Python or Dialoop to the repository."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DIALOOP"))}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with wheels, made in a folder of its own beside them."""

    place: Path

    def pip(self, *words: str) -> None:
        """Run pip of the virtual environment at the root of the repository."""
        command = [str(self.place / "venv" / "bin" / "python"), "-m", "pip", *words]
        subprocess.run(command, cwd=ROOT, env=clean_variables(), check=True)

    def install(self, *names: str) -> None:
        """Install packages of ours from the wheels, and what they need from PyPI."""
        self.pip("install", "--find-links", str(self.place), *names)

    def run(self, folder: Path, program: str, *words: str, typed: str = "") -> str:
        """Run an installed program in a folder and return what it printed."""
        done = subprocess.run(
            [str(self.place / "venv" / "bin" / program), *words],
            cwd=folder,
            env=clean_variables(),
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def origin(self, folder: Path, package: str) -> str:
        """Import a package in a folder and return the file that it came from."""
        return self.run(folder, "python", "-c", f"import {package}; print({package}.__file__)")


@pytest.fixture(scope="module")
def command() -> Iterator[Installed]:
    """The wheels without what only some services need, torch among it."""
    # Gigabytes: pytest would keep those of the last three runs.
    with tempfile.TemporaryDirectory(prefix="dialoop-wheels-") as made:
        installed = Installed(Path(made))
        subprocess.run([sys.executable, "-m", "venv", f"{made}/venv"], check=True)
        installed.pip("wheel", "--no-deps", "--wheel-dir", made, *map(str, PACKAGES))
        installed.install("dialoop-ops")
        yield installed


@pytest.fixture(scope="module")
def everything(command: Installed) -> Installed:
    """All that a job needs."""
    command.install("dialoop-services[replay,inference,scorer,trainer]", "dialoop-ops[stack]")
    return command


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def with_services(tmp_path: Path) -> Path:
    """A folder with a package `services` that nobody may import in place of ours."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    return tmp_path


@pytest.fixture(params=["empty", "with_services"])
def folder(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.getfixturevalue(request.param)
    return chosen


def write_job(folder: Path, run: str, environment: str) -> dict[str, int]:
    """Write job.toml, and return the ports on which it offers inference."""
    ports = choose_ports({"inference": 0, "inference_rest": 0})
    (folder / "job.toml").write_text(JOB.format(run=run, environment=environment, **ports))
    return ports


def test_an_environment_is_written_checked_and_played_without_torch(
    command: Installed, folder: Path
) -> None:
    assert command.origin(folder, "dialoop").startswith(str(command.place))
    assert "reward" in command.run(
        folder, "dialoop", "play", "arithmetic", typed="Result=1<submit>\n"
    )
    command.run(folder, "dialoop", "env", "new", "mine")
    assert "mine" in command.run(folder, "dialoop", "env", "check", "mine:environment")
    command.run(folder, "dialoop", "env", "play", "mine:environment", typed="Result=1<submit>\n")


def test_the_machine_is_ready(everything: Installed, folder: Path) -> None:
    assert everything.origin(folder, "dialoop_services").startswith(str(everything.place))
    assert "Training can start here" in everything.run(folder, "dialoop", "doctor")


def test_an_environment_of_the_users_is_trained(everything: Installed, with_services: Path) -> None:
    folder = with_services
    everything.run(folder, "dialoop", "env", "new", "mine")
    assert "no mistake found" in everything.run(folder, "dialoop", "config", "check", "mine.toml")
    everything.run(folder, "dialoop", "train", "mine.toml")
    summary = json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    assert summary["num_train_steps"] == 16
    assert all(summary["gates"].values()), summary["gates"]
    assert "How many words" in everything.run(folder, "dialoop", "show", "runs/mine")


def test_an_agent_is_recorded_and_trained(everything: Installed, empty: Path) -> None:
    (empty / "asks.py").write_text(AGENT)
    write_job(empty, "recorded", 'agent = "asks:ask"')
    everything.run(empty, "dialoop", "train", "job.toml")
    summary = json.loads((empty / "runs" / "recorded" / "summary.json").read_text())
    assert summary["num_train_steps"] == 2
    assert summary["trajectories"]["trained"] >= 16
    assert "assistant" in everything.run(empty, "dialoop", "show", "runs/recorded")


def test_the_agent_of_the_docs_is_recorded(everything: Installed, empty: Path) -> None:
    everything.pip("install", "openai")
    page = (ROOT / "docs" / "agents.md").read_text("utf-8")
    (code,) = re.findall(r"<!-- test: agent -->\n```python\n(.*?)```", page, re.DOTALL)
    ports = write_job(empty, "served", "")
    for named, port in (("7002", ports["inference"]), ("8002", ports["inference_rest"])):
        code = code.replace(f"127.0.0.1:{named}", f"127.0.0.1:{port}")
    (empty / "my_agent.py").write_text(code)
    everything.run(empty, "dialoop", "up", "job.toml", "--detach")
    try:
        shown = everything.run(empty, "python", "my_agent.py")
    finally:
        everything.run(empty, "dialoop", "down", "served")
    reward, num_tokens, *versions = shown.split()
    assert float(reward) in (0.0, 1.0)
    assert int(num_tokens) > 0
    assert "PolicyVersion" in " ".join(versions)
