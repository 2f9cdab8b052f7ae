"""A whole job under a seeded schedule of faults: it ends by itself, learns, and its books balance.

CHAOS_SEED and CHAOS_ENGINE choose the run of `make chaos`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
from dialoop.running_stacks import find_stack
from dialoop_ops.stack.processes.redis_server import find_redis

from tests.chaos.ledger_checker import check_run
from tests.chaos.machine import KINDS, SERVICES, Machine
from tests.chaos.redis_behind_proxy import RedisBehindProxy, stop_for
from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config

SEED = int(os.environ.get("CHAOS_SEED", "0"))
ENGINE = os.environ.get("CHAOS_ENGINE", "transformers")
WITHIN_S = 1200.0
PAUSE_S = 30.0
NETWORK = ("cut", "delay", "half-open", "dropped answers")
DISK_S, CLOCK_S = 4.0, 3.0

GROUPS_OF_TWO = "groups_per_train_step = 2"
CONFIG = """
run = "job"
seed = 0
engine = "{engine}"
console = false
hang_timeout_s = 30
[inference]
max_model_len = 256
max_num_seqs = 128
[collector]
group_size = 8
max_new_tokens = 24
max_groups_in_flight = 32
[warm_start]
num_steps = 220
batch_size = 32
learning_rate = 3e-3
[train]
num_steps = {num_steps}
groups_per_train_step = {groups_per_step}
num_minibatches = 2
loss = "grpo"
checkpoint_every = 4
[evaluation]
num_tasks = 256
"""


@dataclass
class Chaos:
    """Faults of one run: what was done, and how long the job took to train on."""

    job: Job
    queue: RedisBehindProxy
    machine: Machine
    random: random.Random
    done: list[tuple[str, str, float]] = field(default_factory=list)

    def pid_of(self, service: str) -> int | None:
        """The process of a service that is ready; None while it starts."""
        stack = find_stack(self.job.run_dir)
        process = stack.processes.get(service, {}) if stack else {}
        pid = process.get("pid")
        return pid if process.get("state") == "ready" and isinstance(pid, int) else None

    def num_steps(self) -> int:
        """Train steps so far, those that were repeated too."""
        path = self.job.run_dir / "metrics.jsonl"
        return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0

    def wait_ready(self, service: str) -> int:
        """Wait until a service is up; return its process."""
        wait_for(lambda: self.pid_of(service) is not None or self.has_ended(), WITHIN_S)
        pid = self.pid_of(service)
        assert pid is not None, self.job.output
        return pid

    def has_ended(self) -> bool:
        """Whether the job has come to its end."""
        return self.job.process.poll() is not None

    def do(self, kind: str, target: str) -> None:
        """Do one fault, and wait until the job has trained a step since, or some seconds."""
        num_before, began_at = self.num_steps(), time.monotonic()
        if target == "redis" and kind in ("kill", "stop", "power"):
            self._act_on_redis(kind)
        elif kind == "clock":
            self._set_clock(target)
        elif kind in ("full disk", "failing writes"):
            self._break_disk(kind, target)
        elif target == "network":
            self._act_on_network(kind)
        else:
            pid = self.wait_ready(target)
            if kind == "kill":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            else:
                stop_for(pid, 4.0)
        with suppress(AssertionError):
            wait_for(lambda: self.num_steps() > num_before or self.has_ended(), PAUSE_S)
        self.done.append((kind, target, round(time.monotonic() - began_at, 1)))

    def _act_on_redis(self, kind: str) -> None:
        if kind == "kill":
            self.queue.kill()
        elif kind == "power":
            self.queue.lose_power()
        else:
            stop_for(self.queue.pid, 4.0)

    def _set_clock(self, target: str) -> None:
        """Set a clock forward by up to three hours, then back by up to six; it stays so."""
        ahead_s = self.random.randint(300, 3 * 3600)
        self.machine.jump_clock(target, ahead_s)
        time.sleep(CLOCK_S)
        self.machine.jump_clock(target, ahead_s - self.random.randint(300, 6 * 3600))

    def _break_disk(self, kind: str, target: str) -> None:
        """Let writes fail; a Redis that ends itself for it is started again, as by a supervisor."""
        kinds = KINDS if target == "machine" else (target,)
        self.machine.fail_writes(ENOSPC if kind == "full disk" else EIO, *kinds)
        ends_at = time.monotonic() + DISK_S
        while time.monotonic() < ends_at:
            self.queue.revive()
            time.sleep(0.2)
        self.machine.mend_disk()
        self.queue.revive(is_ready=True)

    def _act_on_network(self, kind: str) -> None:
        proxy = self.queue.proxy
        if kind == "delay":
            proxy.delay_s = 0.05
        elif kind == "half-open":
            proxy.is_half_open = True
        elif kind == "dropped answers":
            proxy.drops_answers = True
        proxy.cut() if kind == "cut" else time.sleep(3.0)
        proxy.delay_s, proxy.is_half_open, proxy.drops_answers = 0.0, False, False


CLOCKS = tuple(("clock", kind) for kind in KINDS)
DISKS = (*(("failing writes", kind) for kind in KINDS), *[("full disk", "machine")] * 2)


def schedule(
    seed: int,
    *,
    num_kills: int,
    num_stops: int,
    power: bool = False,
    machine: tuple[tuple[str, str], ...] = (),
) -> list[tuple[str, str]]:
    """The faults of a run in their order; `machine` are those of clocks and disks."""
    targets = (*SERVICES, "redis")
    faults = [("kill", target) for target in targets] * num_kills
    faults += [("stop", target) for target in targets] * num_stops
    faults += [(kind, "network") for kind in NETWORK]
    faults += [("power", "redis")] * (3 if power else 0)
    faults += machine
    random.Random(seed).shuffle(faults)
    return faults


def run_under(
    folder: Path,
    faults: list[tuple[str, str]],
    *,
    num_steps: int,
    groups_per_step: int = 16,
    appendfsync: str = "always",
    engine: str = ENGINE,
    config: Path | None = None,
) -> dict[str, Any]:
    """Run a job under faults and check its books; return its figures.

    With a `config` of its own the job need not have learned.
    """
    has_to_learn = config is None
    if config is None:
        config = folder / "job.toml"
        numbers = {"num_steps": num_steps, "groups_per_step": groups_per_step}
        config.write_text(CONFIG.format(engine=engine, **numbers))
    program = find_redis({"PATH": os.environ["PATH"]}).program
    machine, began_at = Machine(folder), time.monotonic()
    with (
        RedisBehindProxy(
            program, folder / "queue", appendfsync=appendfsync, variables=machine.variables
        ) as queue,
        Job(folder, "train", str(config), REDIS_URL=queue.url, **machine.variables) as job,
    ):
        chaos = Chaos(job, queue, machine, random.Random(SEED))
        wait_for(lambda: chaos.num_steps() > 0 or chaos.has_ended(), WITHIN_S)
        for kind, target in faults:
            assert not chaos.has_ended(), f"ended after {len(chaos.done)} faults\n{job.output}"
            chaos.do(kind, target)
        num_during = chaos.num_steps()
        ended = job.end(WITHIN_S)
    seconds = time.monotonic() - began_at
    assert ended.exit_code == 0, ended.output[-5000:]
    assert job.left_running() == {}
    assert seconds < WITHIN_S
    assert_accounted(ended.summary)
    problems = check_run(ended.run_dir, queue.folder, program)
    assert problems == [], "\n".join(problems[:20])
    assert not has_to_learn or ended.summary["heldout_greedy_after"] >= 0.9
    figures = {
        "seconds": round(seconds, 1),
        "num_faults": len(chaos.done),
        "num_train_steps": ended.summary["num_train_steps"],
        "num_train_steps_during_faults": num_during,
        "heldout_greedy_after": ended.summary["heldout_greedy_after"],
        "num_restarts": ended.summary["num_restarts"],
        "seconds_to_the_next_step": by_kind(chaos.done),
        "problems": problems,
    }
    if out := os.environ.get("CHAOS_OUT"):
        with Path(out).open("a") as file:
            file.write(json.dumps(figures) + "\n")
    return figures


def by_kind(done: list[tuple[str, str, float]]) -> dict[str, list[float]]:
    """How long it took from each fault to the next train step, by fault."""
    seconds: dict[str, list[float]] = {}
    for kind, target, taken_s in done:
        seconds.setdefault(f"{kind} {target}", []).append(taken_s)
    return seconds


def counts_of(faults: list[tuple[str, str]]) -> Callable[[str, str], int]:
    return lambda kind, target: faults.count((kind, target))


def test_a_schedule_is_the_seeds_and_holds_what_it_must():
    faults = schedule(3, num_kills=3, num_stops=2, machine=CLOCKS + DISKS)
    assert faults == schedule(3, num_kills=3, num_stops=2, machine=CLOCKS + DISKS)
    assert faults != schedule(4, num_kills=3, num_stops=2, machine=CLOCKS + DISKS)
    count = counts_of(faults)
    for target in (*SERVICES, "redis"):
        assert (count("kill", target), count("stop", target)) == (3, 2)
    assert all(count(kind, "network") == 1 for kind in NETWORK)
    for kind in KINDS:
        assert (count("clock", kind), count("failing writes", kind)) == (1, 1)
    assert count("full disk", "machine") == 2


@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_small_job_survives_seven_faults(tmp_path: Path) -> None:
    """The form of the jobs below that takes less than a minute."""
    faults = [("kill", target) for target in ("collector", "redis", "trainer", "replay")]
    faults += [("clock", "redis"), ("full disk", "machine")]
    config = write_config(tmp_path, num_warm_start_steps=100, num_train_steps=20)
    config.write_text(config.read_text().replace("groups_per_train_step = 4", GROUPS_OF_TWO))
    figures = run_under(tmp_path, [*faults, ("cut", "network")], num_steps=20, config=config)
    assert figures["num_faults"] == len(faults) + 1
    assert figures["num_train_steps_during_faults"] >= 5, "the faults came after the training"


@pytest.mark.heavy(reason="a job under some forty faults, up to 20 minutes")
@pytest.mark.redis
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [SEED] if "CHAOS_SEED" in os.environ else [0, 1, 2])
def test_a_job_survives_every_process_killed_three_times(tmp_path: Path, seed: int) -> None:
    faults = schedule(seed, num_kills=3, num_stops=2, machine=CLOCKS + DISKS)
    # Many steps for many faults, of few groups each: late groups mostly lack a signal.
    run_under(tmp_path, faults, num_steps=80, groups_per_step=12)


@pytest.mark.heavy(reason="a job under three power losses, some minutes")
@pytest.mark.redis
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [SEED] if "CHAOS_SEED" in os.environ else [0, 1, 2])
def test_a_job_survives_the_loss_of_the_queues_last_second(tmp_path: Path, seed: int) -> None:
    machine = (("clock", "redis"), ("full disk", "machine"), ("failing writes", "redis"))
    faults = schedule(seed, num_kills=1, num_stops=0, power=True, machine=machine)
    run_under(tmp_path, faults, num_steps=42, appendfsync="everysec")


@pytest.mark.heavy(reason="a job with vLLM under a dozen faults, some minutes")
@pytest.mark.redis
@pytest.mark.timeout(2400)
def test_a_job_with_vllm_survives_every_process_killed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    machine = (("clock", "inference"), ("full disk", "machine"), ("failing writes", "inference"))
    faults = schedule(SEED, num_kills=1, num_stops=1, machine=machine)
    run_under(tmp_path, faults, num_steps=36, engine="vllm")
