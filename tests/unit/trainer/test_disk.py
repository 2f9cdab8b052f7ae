"""Training waits while the disk has no room for what it would write next, and then goes on."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialoop_services.trainer.job import job as jobs
from dialoop_services.trainer.job.job import DISK_LOW

from tests.support.trainer_world import World, worlds
from tests.support.waiting import PATIENCE_S, until

MB = 1 << 20


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, num_steps=2, checkpoint_every=1, min_free_disk_mb=10) as make:
        yield make


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk whose free bytes the test sets."""
    state = SimpleNamespace(free=1000 * MB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: state)
    monkeypatch.setattr(jobs, "_DISK_POLL_S", 0.01)
    return state


async def test_no_step_begins_while_the_disk_is_low_and_all_do_once_there_is_room(
    world: Callable[..., World], disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    here = world()
    here.offer("a", "b")
    here.offer("c", "d")
    disk.free = 10 * MB - 1
    running = asyncio.create_task(here.run())
    await until(lambda: DISK_LOW in here.board.alarms)
    await asyncio.sleep(0.1)
    assert here.job.state.num_train_steps == 0
    waits = [record for record in caplog.records if "room on the disk" in record.message]
    assert [(record.levelno, record.missing_mb) for record in waits] == [(logging.ERROR, 1)]  # type: ignore[attr-defined]
    disk.free = 1000 * MB
    await asyncio.wait_for(running, PATIENCE_S)
    assert here.job.state.num_train_steps == 2
    assert DISK_LOW not in here.board.alarms


async def test_room_for_one_more_checkpoint_counts(
    world: Callable[..., World], disk: SimpleNamespace
) -> None:
    here = world()
    here.offer("a", "b")
    here.offer("c", "d")
    await asyncio.wait_for(here.run(), PATIENCE_S)
    newest = here.checkpoints.newest
    assert newest is not None
    (newest / "optimizer.bin").write_bytes(bytes(3 * MB))
    disk.free = 12 * MB
    assert MB < here.job._missing_disk_bytes() < 2 * MB


async def test_a_job_that_waits_for_the_disk_stops_at_once(
    world: Callable[..., World], disk: SimpleNamespace
) -> None:
    here = world()
    disk.free = 0
    running = asyncio.create_task(here.run())
    await until(lambda: DISK_LOW in here.board.alarms)
    here.board.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    assert here.job.state.num_train_steps == 0


async def test_a_disk_that_is_not_watched_stops_nothing(
    world: Callable[..., World], disk: SimpleNamespace
) -> None:
    here = world(min_free_disk_mb=0)
    here.offer("a", "b")
    here.offer("c", "d")
    disk.free = 0
    await asyncio.wait_for(here.run(), PATIENCE_S)
    assert here.job.state.num_train_steps == 2
