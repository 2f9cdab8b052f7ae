"""Engine and trainer share a device and one of them is killed in the other's turn."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from dialoop.errors import Unavailable
from dialoop_ops.stack.processes.supervisor import supervise
from dialoop_services.runtime.device_lock import DeviceLock, is_owned

from tests.faults.test_stack_supervisor import STUBBORN_CHILD, log_in, spec
from tests.support.placement_parts import HOLD
from tests.support.stack_jobs import Job, lines_of, wait_for
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
run = "job"
engine = "{engine}"
store = "memory"
placement = "shared"
[inference]
max_num_seqs = 16
[collector]
group_size = 2
max_new_tokens = 8
[scorer]
rewards = [{{ name = "sum", use = "tests.support.placement_parts:token_sum" }}]
[train]
num_steps = 5
groups_per_train_step = 2
pipeline_depth = 0
loss = "tests.support.placement_parts:slow_loss"
checkpoint_every = 2
[evaluation]
num_tasks = 2
every = 2
num_running_tasks = 2
"""


def num_train_rows(job: Job) -> int:
    path = job.run_dir / "metrics.jsonl"
    return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0


class Hold:
    """Keeps the trainer inside a train step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hold"
        self.inside = self.path.with_suffix(".inside")

    def begin(self) -> None:
        """Wait until a train step stands still."""
        self.inside.unlink(missing_ok=True)
        self.path.touch()
        wait_for(self.inside.exists, 400.0)

    def end(self) -> None:
        self.path.unlink()


def kill(job: Job, service: str) -> int:
    pid = job.service(service)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def play(folder: Path, engine: str) -> None:
    config = folder / "job.toml"
    config.write_text(CONFIG.format(engine=engine))
    hold, lock = Hold(folder), folder / "runs" / "job" / "device.lock"
    with Job(folder, "train", str(config), **{HOLD: str(hold.path)}) as job:
        wait_for(lambda: num_train_rows(job) >= 1, 400.0)

        hold.begin()
        killed = kill(job, "inference")
        wait_for(lambda: job.service("inference") not in (None, killed), 400.0)
        log = job.run_dir / "logs" / "inference.log"
        wait_for(lambda: "Waiting for the device" in log.read_text(), 400.0)
        assert is_owned(lock), "the trainer works on"
        steps = num_train_rows(job)
        hold.end()
        wait_for(lambda: num_train_rows(job) > steps, 400.0)

        hold.begin()
        assert is_owned(lock)
        killed = kill(job, "trainer")
        wait_for(lambda: job.service("trainer") not in (None, killed), 400.0)
        hold.end()
        ended = job.end(400.0)
    assert ended.exit_code == 0, ended.output
    assert ended.summary["num_train_steps"] == 5
    restarts = ended.summary["num_restarts"]
    assert (restarts["inference"], restarts["trainer"]) == (1, 1)
    assert job.left_running() == {}
    left = DeviceLock(lock)
    assert left.try_own(), "nobody has the device any more"
    left.release()


@pytest.mark.heavy(reason="kills processes of a whole job, about a minute")
@pytest.mark.timeout(1800)
def test_neither_takes_the_device_from_the_other_when_one_is_killed(tmp_path: Path) -> None:
    play(tmp_path, "transformers")


@pytest.mark.heavy(reason="starts vLLM twice")
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_neither_takes_it_from_the_other_with_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")
    play(tmp_path, "vllm")


async def test_a_replica_that_waits_for_the_device_is_not_late(tmp_path: Path) -> None:
    slow = STUBBORN_CHILD.replace("pathlib.Path", "time.sleep(1.5); pathlib.Path")
    held_up = replace(spec(tmp_path, slow), ready_timeout_s=0.5, is_held_up=lambda: True)
    async with supervise(log_in(tmp_path)) as supervisor:
        await asyncio.wait_for(supervisor.start(held_up), PATIENCE_S)
    (tmp_path / "probe.ready").unlink()
    never = spec(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(replace(never, ready_timeout_s=0.3))
    assert caught.group_contains(Unavailable, match="was not ready within")
