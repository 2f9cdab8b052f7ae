"""The kit's clock jumps and its disk fails, for the processes that are meant and no others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EIO, ENOSPC
from pathlib import Path

import pytest
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits

from tests.chaos.machine import Machine
from tests.support.redis_server import RedisServer
from tests.support.samples.replay_samples import announce, lease_tasks, offer
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import os, shutil, sys, threading, time
file = open(sys.argv[1], "wb", buffering=0)
for line in sys.stdin:
    waited = time.monotonic()
    threading.Event().wait(0.05)
    answer = [time.time(), time.monotonic() - waited, shutil.disk_usage(".").free]
    for act in (lambda: file.write(b"x"), lambda: os.fsync(file.fileno())):
        try:
            act()
            answer.append(0)
        except OSError as error:
            answer.append(error.errno)
    print(*answer, flush=True)
"""


@contextmanager
def process(machine: Machine, folder: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says its time, the seconds of a wait, free bytes and what writes did."""
    command = [sys.executable, "-c", PROGRAM, str(folder / kind), f"dialoop_services.{kind}"]
    with subprocess.Popen(
        command,
        env=os.environ | machine.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started
        started.stdin.close()


def ask(process: subprocess.Popen[str]) -> list[float]:
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(word) for word in process.stdout.readline().split()]


def test_clocks_and_disks_fail_for_those_that_are_meant(tmp_path: Path):
    machine = Machine(tmp_path)
    with (
        process(machine, tmp_path, "trainer") as trainer,
        process(machine, tmp_path, "scorer") as scorer,
    ):
        machine.jump_clock("trainer", -7200)
        now, waited, free, *errors = ask(trainer)
        assert abs(now + 7200 - time.time()) < 60
        assert 0.05 <= waited < 20
        assert free > 0
        assert errors == [0, 0]
        machine.fail_writes(ENOSPC, "trainer")
        _, _, free, *errors = ask(trainer)
        assert (free, errors) == (0, [ENOSPC, 0])
        machine.fail_writes(EIO, "trainer")
        assert ask(trainer)[3:] == [EIO, EIO]
        now, _, free, *errors = ask(scorer)
        assert abs(now - time.time()) < 60
        assert (free > 0, errors) == (True, [0, 0])
        machine.mend_disk()
        assert ask(trainer)[3:] == [0, 0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.mark.redis
async def test_leases_outlive_a_jump_of_the_queues_clock_and_end_after_it(
    tmp_path: Path, machine: Machine
):
    """Forwards they would all run out at once; backwards nobody would get the task for hours."""
    server = RedisServer(tmp_path, fsync="no")
    server.start()
    store = RedisStore(server.url, QueueLimits(), timeout_s=PATIENCE_S)
    try:
        await announce(store, "run")
        await offer(store, "run", "a")
        assert (await lease_tasks(store, "run", lease_s=20)).leases
        machine.jump_clock("redis", 7200)
        assert not (await lease_tasks(store, "run")).leases
        await offer(store, "run", "b")
        assert (await lease_tasks(store, "run", lease_s=1)).leases
        machine.jump_clock("redis", -7200)
        assert not (await lease_tasks(store, "run")).leases
        async with asyncio.timeout(PATIENCE_S):
            while not (await lease_tasks(store, "run")).leases:
                await asyncio.sleep(0.05)
    finally:
        await store.close()
        server.stop()
