"""Fifty collectors and replicas join, are drained and are killed while one job runs.

FLEET_SEED chooses the schedule, and FLEET_OUT a file for the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from dialoop.running_stacks import find_stack
from dialoop_ops.cli.scale import scale
from dialoop_ops.stack.processes.redis_server import find_redis

from tests.chaos.ledger_checker import check_run
from tests.chaos.test_chaos import CONFIG, WITHIN_S
from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for

SEED = int(os.environ.get("FLEET_SEED", "0"))
NUM_EVENTS, NUM_STEPS = 50, 110
ROLES = ("collector", "inference")
FEWEST, MOST = 1, 3
PATIENCE_S = 600.0
RECORD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO (.*)$", re.MULTILINE)
SERVES_WITHIN_S = 10.0

Event = tuple[str, str]


def schedule(seed: int) -> list[Event]:
    """The events of a run in their order; there is always one of each role, and three at most."""
    chance, present = random.Random(seed), dict.fromkeys(ROLES, FEWEST)
    events: list[Event] = []
    while len(events) < NUM_EVENTS:
        kind, role = chance.choice(("join", "drain", "kill")), chance.choice(ROLES)
        after = present[role] + {"join": 1, "drain": -1, "kill": 0}[kind]
        if FEWEST <= after <= MOST:
            present[role] = after
            events.append((kind, role))
    return events


@dataclass
class Fleet:
    """A job whose collectors and replicas come and go, and how long each event took."""

    job: Job
    done: list[tuple[str, str, float]] = field(default_factory=list)

    def pid_of(self, name: str) -> int | None:
        """The process of that name if it is ready."""
        stack = find_stack(self.job.run_dir)
        process = stack.processes.get(name, {}) if stack else {}
        pid = process.get("pid")
        return pid if process.get("state") == "ready" and isinstance(pid, int) else None

    def num_steps(self) -> int:
        """Train steps so far."""
        path = self.job.run_dir / "metrics.jsonl"
        return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0

    def has_ended(self) -> bool:
        """Whether the job has come to its end."""
        return self.job.process.poll() is not None

    def do_event(self, event: Event, chance: random.Random) -> None:
        """Do one event, and wait until the job has trained a step since, or some seconds."""
        (kind, role), num_before, began_at = event, self.num_steps(), time.monotonic()
        if kind == "kill":
            wait_for(lambda: self.ready(role) or self.has_ended(), PATIENCE_S)
            pid = self.pid_of(chance.choice(self.ready(role)))
            if pid is not None:  # else it is gone already
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self.scale(f"{role}={'+1' if kind == 'join' else '-1'}")
        with suppress(AssertionError):
            wait_for(lambda: self.num_steps() > num_before or self.has_ended(), 15.0)
        self.done.append((kind, role, round(time.monotonic() - began_at, 1)))

    def ready(self, role: str) -> list[str]:
        """Names of the processes of a role that are ready."""
        stack = find_stack(self.job.run_dir)
        names = stack.processes if stack else {}
        return [n for n in names if n.partition("-")[0] == role and self.pid_of(n)]

    def scale(self, count: str) -> None:
        """What `dialoop scale` does; it returns once the processes are ready or have ended."""
        root = self.job.run_dir.parent
        words = {
            "root": root,
            "run": "job",
            "counts": [count],
            "timeout": PATIENCE_S,
            "json": False,
        }
        assert scale(argparse.Namespace(**words)) == 0


def records_of(log: Path) -> list[tuple[float, str]]:
    """Times and messages of a service's log."""
    return [
        (datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), message)
        for at, message in RECORD.findall(log.read_text("utf-8", errors="replace"))
    ]


def admissions(logs: Path) -> dict[tuple[str, int], float]:
    """When the trainer, which had compared its log-probs, put each member into rotation."""
    members: dict[tuple[str, int], float] = {}
    for at, message in records_of(logs / "trainer.log"):
        if match := re.match(r"A replica is in rotation\. .*replica=(\S+) epoch=(\d+)", message):
            members.setdefault((match[1], int(match[2])), at)
    return members


def lives(logs: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Of each member: when its model was loaded, and when it first answered, if it did."""
    members: dict[tuple[str, int], dict[str, float]] = {}
    for log in logs.glob("inference*.log"):
        loaded_at, member = math.nan, None
        for at, message in records_of(log):
            if message.startswith("The model is loaded."):
                loaded_at, member = at, None
            elif match := re.match(r"Joined the run\. .*instance=(\S+) epoch=(\d+)", message):
                member = match[1], int(match[2])
                assert not math.isnan(loaded_at), f"{log} says not when its model was loaded"
                members[member] = {"loaded": loaded_at}
            elif message.startswith("The first request is answered.") and member:
                members[member]["answered"] = at
    return members


def test_a_schedule_is_the_seeds_and_keeps_to_its_bounds() -> None:
    assert schedule(1) == schedule(1) != schedule(2)
    events = schedule(SEED)
    assert len(events) == NUM_EVENTS
    assert {(k, r) for k, r in events} == {(k, r) for k in ("join", "drain", "kill") for r in ROLES}


@pytest.mark.heavy(reason="a job whose processes start and end fifty times, about ten minutes")
@pytest.mark.redis
@pytest.mark.timeout(3600)
def test_fifty_joins_drains_and_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    text = CONFIG.format(engine="transformers", num_steps=NUM_STEPS, groups_per_step=16)
    config.write_text(
        f'discovery = "registry"\n{text}'.replace("num_tasks = 256", "num_tasks = 64")
    )
    program = find_redis({"PATH": os.environ["PATH"]}).program
    events, chance, began_at = schedule(SEED), random.Random(SEED), time.monotonic()
    # The queue remembers all tasks, so that the checker can ask it for each.
    variables = {"REDIS_URL": "", "DIALOOP_REPLAY_MAX_FINISHED": "200000"}
    with Job(tmp_path, "train", str(config), **variables) as job:
        fleet = Fleet(job)
        wait_for(lambda: fleet.num_steps() > 0 or fleet.has_ended(), WITHIN_S)
        for event in events:
            assert not fleet.has_ended(), f"ended after {len(fleet.done)} events\n{job.output}"
            fleet.do_event(event, chance)
        num_during = fleet.num_steps()
        ended = job.end(WITHIN_S)
    assert ended.exit_code == 0, ended.output[-5000:]
    assert job.left_running() == {}
    assert_accounted(ended.summary)
    problems = check_run(ended.run_dir, ended.run_dir / "redis", program)
    assert problems == [], "\n".join(problems[:20])
    rotation, members = admissions(ended.run_dir / "logs"), lives(ended.run_dir / "logs")
    served = {member: life for member, life in members.items() if "answered" in life}
    unproved = [m for m, life in served.items() if not rotation.get(m, life["answered"] + 1)
                <= life["answered"]]  # fmt: skip
    assert served
    assert unproved == [], "each was put into rotation before its first answer"
    waits = [rotation[m] - life["loaded"] for m, life in served.items()]
    answers = [life["answered"] - life["loaded"] for life in served.values()]
    _keep(ended.summary, fleet, num_during, waits, answers, time.monotonic() - began_at)
    assert len(waits) >= 5
    assert statistics.median(waits[:5]) <= SERVES_WITHIN_S, waits


def _keep(
    summary: dict[str, Any],
    fleet: Fleet,
    num_during: int,
    waits: list[float],
    answers: list[float],
    seconds: float,
) -> None:
    """Add the figures of the run to the file that FLEET_OUT names."""
    if not (out := os.environ.get("FLEET_OUT")):
        return
    figures = {
        "seed": SEED,
        "events": {
            f"{k} {r}": n for (k, r), n in Counter((k, r) for k, r, _ in fleet.done).items()
        },
        "seconds": round(seconds, 1),
        "num_train_steps": summary["num_train_steps"],
        "num_train_steps_during_events": num_during,
        "heldout_greedy_after": summary["heldout_greedy_after"],
        "problems": 0,
        "num_replicas_that_served": len(waits),
        "seconds_from_model_to_rotation": [round(wait, 2) for wait in sorted(waits)],
        "seconds_from_model_to_first_answer": [round(wait, 2) for wait in sorted(answers)],
        "median_from_model_to_rotation": round(statistics.median(waits), 2),
    }
    with Path(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")
