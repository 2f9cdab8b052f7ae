"""Fifty collectors and replicas join, are drained and are killed while a job runs in one process.

A kill cuts a service off from all others at once, as the end of its process does: nothing is given
back, no lease is withdrawn, and answers under way break off. FLEET_SEED chooses the schedule.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import statistics
import time
from collections import Counter
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.channel import EPOCH_METADATA, Channel
from dialoop_ops.stack import in_process as module
from dialoop_ops.stack.in_process import read_job
from dialoop_ops.stack.layout import SETTINGS, service_of
from dialoop_ops.stack.run_dir import open_run
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.runtime.settings import load

from tests.chaos.ledger_checker import (
    _problems_of_steps,
    _rows_by_group,
    _steps_kept,
    read_lines,
)
from tests.chaos.test_fleet_of_fifty import NUM_EVENTS, Event, schedule
from tests.support.collector_world import adds_up

SEED = int(os.environ.get("FLEET_SEED", "0"))
JOB: dict[str, Any] = {
    "run": "fleet",
    "discovery": "registry",
    "seed": 0,
    "warm_start": {"num_steps": 110, "batch_size": 32, "learning_rate": 3e-3},
    "collector": {"group_size": 8, "max_new_tokens": 24, "lease_s": 5.0},
    "train": {"num_steps": 100_000, "groups_per_train_step": 4, "loss": "grpo"},
    "evaluation": {"num_tasks": 0},
    "gates": {"rescoring_s": 0},
}
SERVES_WITHIN_S = 10.0


class Services(module._Services):
    """Services of one process that can be cut off from each other."""

    def __init__(self, layout: Any) -> None:
        super().__init__(layout)
        self.channels: dict[str, list[Channel]] = {}

    def _begin(self, name: str) -> None:
        service, channels = service_of(name), list[Channel]()
        own = {"worker": name} if service == "collector" else {}
        settings = load(SETTINGS[service], **self._layout.values_of(name), **own)

        def connect(address: str, to: Any, **options: Any) -> Channel:
            channels.append(self.network.connect(address, to, **options))
            return channels[-1]

        self.channels[name] = channels
        self._servers[name] = server = self.network.server(name)
        host = module._Host(server=server, connect=connect)
        serve_in = import_module(f"dialoop_services.{service}.__main__").serve_in
        self._tasks[name] = asyncio.create_task(serve_in(host, settings))

    def present(self, role: str) -> list[str]:
        """Names of the services of a role that run."""
        return [n for n, t in self._tasks.items() if service_of(n) == role and not t.done()]

    async def do(self, event: Event, chance: random.Random) -> None:
        """Do one event."""
        kind, role = event
        names = self.present(role)
        if kind == "join":
            free = (role, *(f"{role}-{number}" for number in range(1, 9)))
            await self.start_one(next(name for name in free if name not in names))
        elif kind == "drain":
            await self.stop(chance.choice(names))
        else:
            await self.kill(chance.choice(names))

    async def start_one(self, name: str) -> None:
        """Start a service, and wait until it listens."""
        self._begin(name)
        await self._listening(name)

    async def kill(self, name: str) -> None:
        """End a service without a word to anybody, and start it again under its name."""
        server, task = self._servers[name], self._tasks[name]
        server._settings = server._settings.model_copy(update={"drain_s": 0.0})
        for channel in self.channels[name]:
            await channel.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.start_one(name)


class Watch(logging.Handler):
    """What the logs say of members: when each joined, and was put into rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, float] = {}
        self.admitted: dict[int, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record."""
        times = {"Joined the run.": self.joined, "A replica is in rotation.": self.admitted}
        if record.msg in times:
            times[record.msg].setdefault(vars(record)["epoch"], record.created)


def watch_answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """When each member first got a question, by the epoch that its caller meant."""
    times: dict[int, float] = {}
    for name in ("Generate", "GenerateStream"):
        rpc = getattr(InferenceServicer, name)

        def noting(self: Any, request: Any, context: Any, rpc: Any = rpc) -> Any:
            epochs = dict(context.invocation_metadata() or ())
            times.setdefault(int(epochs[EPOCH_METADATA]), time.time())
            return rpc(self, request, context)

        monkeypatch.setattr(InferenceServicer, name, noting)
    return times


async def step_after(dialoop: Any, *, within_s: float = 20.0) -> None:
    """Wait until the job has trained a step since, or some seconds."""
    began = (await dialoop.trainer.get_status()).num_train_steps
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while (await dialoop.trainer.get_status()).num_train_steps <= began:
                await asyncio.sleep(0.05)


@pytest.mark.heavy(reason="fifty starts and ends of collectors and replicas, a minute or two")
@pytest.mark.timeout(1200)
async def test_fifty_joins_drains_and_kills_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_Services", Services)
    first_calls, watch = watch_answers(monkeypatch), Watch()
    logging.getLogger("dialoop_services").addHandler(watch)
    logging.getLogger("dialoop_services").setLevel(logging.INFO)
    job, chance, began_at = read_job(JOB).config, random.Random(SEED), time.monotonic()
    with ExitStack() as exits:
        exits.callback(logging.getLogger("dialoop_services").removeHandler, watch)
        run_dir = exits.enter_context(open_run(tmp_path, job, fresh=True))
        async with module._running(job, run_dir) as (services, dialoop):
            await step_after(dialoop, within_s=120.0)
            for event in schedule(SEED):
                await services.do(event, chance)  # type: ignore[attr-defined]
                await step_after(dialoop)
                services.require_no_failure()
            num_steps = (await dialoop.trainer.get_status()).num_train_steps
            await services.stop("trainer", *services.present("collector"), "scorer")  # type: ignore[attr-defined]
            counts = (await dialoop.replay.get_stats(run_dir.run_id)).training
        rows = read_lines(run_dir.path, "trajectories.jsonl")
        steps = _steps_kept(read_lines(run_dir.path, "metrics.jsonl"))
    assert num_steps >= NUM_EVENTS // 2, "the job trained meanwhile"
    assert adds_up(counts), counts
    trained = _rows_by_group(rows, steps)
    problems = list(_problems_of_steps(trained, steps, job.train.max_staleness))
    assert problems == [], "\n".join(problems[:20])
    late = {e: at for e, at in first_calls.items() if watch.admitted.get(e, at + 1) > at}
    assert late == {}, "each was put into rotation before it got a question"
    waits = [watch.admitted[epoch] - watch.joined[epoch] for epoch in first_calls]
    if out := os.environ.get("FLEET_OUT"):
        figures = {
            "seed": SEED,
            "events": dict(Counter(map(" ".join, schedule(SEED)))),
            "seconds": round(time.monotonic() - began_at, 1),
            "num_train_steps": num_steps,
            "num_groups_trained": len(trained),
            "num_replicas_that_served": len(first_calls),
            "seconds_from_model_to_rotation": [round(wait, 2) for wait in sorted(waits)],
            "problems": problems,
        }
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
    assert len(waits) >= 5
    assert statistics.median(waits[:5]) <= SERVES_WITHIN_S
