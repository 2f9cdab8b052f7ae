"""Jobs for tests: a small config, a stack in a process of its own, and what it leaves running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

CONFIG = """
run = "job"
engine = "{engine}"
store = "{store}"
console = false
[inference]
max_num_seqs = 64
[warm_start]
num_steps = {num_warm_start_steps}
batch_size = {warm_start_batch_size}
[train]
num_steps = {num_train_steps}
groups_per_train_step = 4
loss = "grpo"
checkpoint_every = 2
[evaluation]
num_tasks = 16
every = 3
num_running_tasks = 8
"""


def write_config(directory: Path, extra: str = "", **changes: Any) -> Path:
    """A job of seconds; `extra` is TOML to add at the end."""
    values = {
        "engine": "transformers",
        "store": "redis",
        "num_warm_start_steps": 150,
        "warm_start_batch_size": 64,
        "num_train_steps": 6,
    }
    path = directory / "job.toml"
    path.write_text(CONFIG.format(**values | changes) + extra)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """What a job left behind."""

    exit_code: int
    output: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary


class Job:
    """`python -m dialoop_ops.stack` in `directory`; ended when the context is left."""

    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self.directory = directory
        self._log = directory / "output.txt"
        # Marks all its descendants, whatever group or session they move to.
        self._mark = f"DIALOOP_TEST_MARK={directory}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")}
        environment |= {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}:{ROOT / 'client'}",
            "DIALOOP_TEST_MARK": str(directory),
        }
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dialoop_ops.stack", *arguments],
                cwd=directory,
                env=environment | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=120)

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        """Of the run named in CONFIG."""
        return self.directory / "runs" / "job"

    def end(self, timeout_s: float) -> EndedJob:
        """Wait for its end."""
        code = self.process.wait(timeout=timeout_s)
        return EndedJob(exit_code=code, output=self.output, run_dir=self.run_dir)

    def left_running(self) -> dict[int, str]:
        """Processes it has started that still run, by pid."""
        return {
            int(directory.name): command
            for directory in Path("/proc").glob("[0-9]*")
            if (command := self._command(directory)) and int(directory.name) != self.process.pid
        }

    def service(self, module: str) -> int | None:
        """The pid of `python -m dialoop_services.<module>`, or None while there is none."""
        wanted = f"-m dialoop_services.{module} "
        pids = (pid for pid, command in self.left_running().items() if wanted in f"{command} ")
        return next(pids, None)

    def num_ready(self, service: str) -> int:
        """How often a service has said that it is ready."""
        return len(re.findall(rf"s  {service} +ready at ", self.output))

    def _command(self, directory: Path) -> str:
        try:
            if self._mark.encode() not in (directory / "environ").read_bytes().split(b"\0"):
                return ""
            command = (directory / "cmdline").read_bytes()
        except OSError:
            return ""
        return command.replace(b"\0", b" ").decode(errors="replace").strip()


def lines_of(path: Path) -> list[str]:
    """The lines of a file."""
    return path.read_text().splitlines()


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def assert_accounted(summary: dict[str, Any]) -> None:
    """Generated = trained + dropped + left, by everybody's own count."""
    for name in ("trajectories", "evaluation_trajectories", "groups"):
        counts = summary[name]
        accounted = counts["trained"] + sum(counts["dropped"].values()) + counts["left"]
        assert counts["generated"] == accounted > 0, (name, counts)
    accounting = summary["accounting"]
    assert accounting["ledger_adds_up"], accounting
    assert accounting["collectors_agree"], accounting
    assert accounting["trainer_agrees"], accounting
