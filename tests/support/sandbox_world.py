"""A sandbox under attack, beside a session that minds its own business."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import psutil
import pytest
from _pytest.mark import ParameterSet
from dialoop.sandbox import Execution, Level, Limits, Sandbox
from dialoop.sandbox.self_test import assess

from tests.support.waiting import PATIENCE_S

LIMITS = Limits(max_memory_bytes=192 * 2**20, max_disk_bytes=4 * 2**20, max_cpu_s=30)
# On a machine that is busy with other things, a neighbour may wait for a time slice or two.
USUAL_S = 2.0


@dataclass
class Scene:
    """A sandbox with a session in it that minds its own business."""

    sandbox: Sandbox

    @property
    def level(self) -> Level:
        return self.sandbox.isolation.level

    async def attack(self, code: str, *, timeout_s: float = PATIENCE_S) -> Execution:
        return await self.sandbox.run(code, timeout_s=timeout_s)


def _levels() -> Iterator[Level | ParameterSet]:
    """Every level; the default run attacks the strongest one that this machine has."""
    weaker = False
    for level in Level:
        marks = pytest.mark.heavy(reason="a weaker level than this machine has")
        yield pytest.param(level, marks=marks) if weaker else level
        weaker = weaker or not assess(level).missing


@pytest.fixture(params=_levels())
async def scene(request) -> AsyncIterator[Scene]:
    missing = assess(request.param).missing
    if missing:
        pytest.skip(f"level {request.param} is not available here: {missing}")
    sandbox = Sandbox(level=request.param, limits=LIMITS)
    neighbour, times = sandbox.interpreter(), []
    await neighbour.run("count = 0")

    async def mind_own_business() -> None:
        while True:
            started = time.perf_counter()
            done = await neighbour.run("count += 1\nprint(count)")
            times.append(time.perf_counter() - started)
            assert done.stdout == f"{len(times)}\n"
            await asyncio.sleep(0.01)

    business = asyncio.create_task(mind_own_business())
    yield Scene(sandbox)
    async with asyncio.timeout(PATIENCE_S):
        while len(times) < 5 and not business.done():
            await asyncio.sleep(0.01)
    assert not business.done(), business
    business.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await business
    await sandbox.close()
    assert sorted(times)[len(times) // 2] < USUAL_S


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


async def wait_until_gone(pids: list[int]) -> None:
    """Dead, or at least a zombie that its adopter has yet to reap."""
    async with asyncio.timeout(PATIENCE_S):
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.02)
