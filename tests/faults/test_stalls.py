"""Twelve stalls of a running job: each is named within 30 seconds, with who waits for whom."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis
from dialoop.clients.channel import Channel
from dialoop.clients.trainer import TrainerClient
from dialoop.running_stacks import find_stack
from dialoop_ops.now import Now, Watcher

from tests.support.stack_jobs import Job, lines_of, wait_for, write_config

NAMED_WITHIN_S = 30.0
PATIENCE_S = 300.0

# Rewards that take as long as a file is there, and that are all the same while another one is.
ENVIRONMENT = """
import asyncio
from pathlib import Path

from dialoop.environments.rewards.functions import ExactResult
from dialoop.environments.standard import tool_environment
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticDemonstrations, ArithmeticTasks
from dialoop.environments.tools.calculator import Calculator

HERE = Path(__file__).parent


async def result(episode):
    while (HERE / "slow").exists():
        await asyncio.sleep(0.05)
    return 0.0 if (HERE / "flat").exists() else ExactResult()(episode)


def stalling():
    return tool_environment(
        name="stalling",
        tasks=ArithmeticTasks(),
        tools=[Calculator()],
        rewards=[result],
        max_turns=3,
        demonstrate=ArithmeticDemonstrations(),
    )
"""
JOB = """
[environment]
use = "stalling:stalling"
"""


def write_job(folder: Path, first_line: str = "") -> Path:
    (folder / "stalling.py").write_text(ENVIRONMENT)
    config = write_config(folder, JOB, num_warm_start_steps=110, num_train_steps=100_000)
    config.write_text(f"hang_timeout_s = 0\n{first_line}\n{config.read_text()}")
    return config


def has_addresses(job: Job) -> bool:
    stack = find_stack(job.run_dir)
    return stack is not None and bool(stack.addresses)


def num_steps(job: Job) -> int:
    path = job.run_dir / "metrics.jsonl"
    return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0


@asynccontextmanager
async def watching(job: Job) -> AsyncIterator[Watcher]:
    stack = find_stack(job.run_dir)
    assert stack is not None
    async with Watcher(stack) as watcher:
        yield watcher


async def seconds_until(
    watcher: Watcher, is_named: Callable[[Now], bool], *, patience_s: float = 3 * NAMED_WITHIN_S
) -> float:
    """How long it takes from now on until a look names the stall."""
    began_at = time.monotonic()
    while not is_named(now := await watcher.look()):
        assert time.monotonic() < began_at + patience_s, (now.alarms, now.blocked)
        await asyncio.sleep(0.5)
    return time.monotonic() - began_at


def pid_of(job: Job, service: str) -> int:
    """The process of a service, as the stack says it."""
    stack = find_stack(job.run_dir)
    assert stack is not None
    pid = stack.processes[service]["pid"]
    assert isinstance(pid, int)
    return pid


@contextmanager
def stop_process(job: Job, service: str):
    """A process that is stopped, and goes on when the context is left."""
    pid = pid_of(job, service)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def switch_on(folder: Path, name: str):
    """A file that makes the environment slow, or its rewards flat."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink()


@contextmanager
def full_queue(job: Job):
    """A Redis whose memory is nearly used up."""
    line = Path(f"/proc/{pid_of(job, 'redis')}/cmdline").read_text()
    port = re.search(r":(\d+)", line)
    assert port is not None
    password = (job.run_dir / "redis" / "redis.conf").read_text().split()[1]
    client = redis.Redis(port=int(port[1]), password=password)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", int(1.01 * used))
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)
        client.close()


def stalls(pattern: str) -> Callable[[Now], bool]:
    """Whether an alarm that names a stall or a silent service matches."""
    return lambda now: any(re.search(pattern, alarm) for alarm in now.alarms)


# An evaluation may run beside the train steps, and wait longer for the same cause.
GROUPS = r"trainer waits for {} \(groups .*"
STOPS = {
    "environment": r"collector waits for environment \(\w+.*\), .* <- environment does not serve",
    "inference": r"collector waits for inference \(Generate.*\), .* <- inference does not serve",
    "scorer": GROUPS.format("scorer") + "<- scorer does not serve",
    "replay": r"waits for replay \(.* <- replay does not serve|replay has not served for",
    "redis": r"replay waits for redis|replay is not ready|replay has not served for",
    "collector": GROUPS.format("collector") + "<- collector does not serve",
    "trainer": r"trainer has not served for \d+ s",
}


@pytest.mark.heavy(reason="a job stalls twelve times, half a minute each")
@pytest.mark.redis
@pytest.mark.timeout(1800)
async def test_twelve_stalls_are_named_within_half_a_minute(tmp_path: Path) -> None:
    seconds: dict[str, float] = {}
    with Job(tmp_path, "train", str(write_job(tmp_path)), "--fresh") as job:

        async def advance(by: int = 2) -> None:
            goal = num_steps(job) + by
            await asyncio.to_thread(wait_for, lambda: num_steps(job) >= goal, PATIENCE_S)

        await advance()
        async with watching(job) as watcher:
            for service, pattern in STOPS.items():
                with stop_process(job, service):
                    seconds[service] = await seconds_until(watcher, stalls(pattern))
                await advance()
            with switch_on(tmp_path, "slow"):
                slow = GROUPS.format("collector") + r"<- collector waits for environment"
                seconds["slow reward"] = await seconds_until(watcher, stalls(slow))
            await advance()
            with switch_on(tmp_path, "flat"):
                seconds["flat rewards"] = await seconds_until(watcher, stalls("groups to train"))
            await advance()
            with full_queue(job):
                seconds["full queue"] = await seconds_until(watcher, stalls("its memory is full"))
            await advance()
            trainer = TrainerClient(Channel(watcher.stack.addresses["trainer"]))
            await trainer.pause()
            seconds["pause"] = await seconds_until(watcher, stalls("trainer waits for resume"))
            await trainer.resume()
            await advance()
        assert job.process.poll() is None
        log = (job.run_dir / "logs" / "trainer.log").read_text("utf-8")
    assert "Waits for groups to train." in log
    (tmp_path / "low").mkdir()
    config = write_job(tmp_path / "low")
    too_much = "[train]\nmin_free_disk_mb = 1_000_000_000\n"
    config.write_text(config.read_text().replace("[train]\n", too_much))
    with Job(tmp_path / "low", "train", str(config), "--fresh") as job:
        await asyncio.to_thread(wait_for, lambda: has_addresses(job), PATIENCE_S)
        async with watching(job) as watcher:
            # The stall begins after the warm start, which takes as long as the machine needs.
            await seconds_until(
                watcher,
                lambda now: any("DISK_LOW" in alarm for alarm in now.alarms),
                patience_s=PATIENCE_S,
            )
            seconds["low disk"] = await seconds_until(watcher, stalls("trainer waits for disk"))
    assert len(seconds) == 12
    assert {name: s for name, s in seconds.items() if s > NAMED_WITHIN_S} == {}
