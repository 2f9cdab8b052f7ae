"""The lock of a device: many may share it, one may own it, and the dead own nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dialoop.errors import InvalidConfig
from dialoop_services.runtime.device_lock import DeviceLock, is_owned

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOLD = """
import sys, time
from pathlib import Path
from dialoop_services.runtime.device_lock import DeviceLock
lock = DeviceLock(Path(sys.argv[1]))
assert getattr(lock, sys.argv[2])()
print("held", flush=True)
time.sleep(60)
"""
ROOT = Path(__file__).parents[3]


@contextmanager
def another_process(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it is killed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"}
    command = [sys.executable, "-c", _HOLD, str(path), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_engines_share_a_device_and_the_trainer_owns_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "device.lock"
    first, second, trainer = DeviceLock(path), DeviceLock(path), DeviceLock(path)
    assert first.try_share()
    assert first.try_share(), "who holds it holds it"
    assert second.try_share()
    assert not trainer.try_own()
    first.release()
    assert not trainer.try_own(), "one engine is still awake"
    second.release()
    second.release()
    assert trainer.try_own()
    assert trainer.is_held
    assert not first.try_share()
    assert is_owned(path)
    trainer.release()
    assert not is_owned(path)
    assert not trainer.is_held


def test_a_killed_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    mine = DeviceLock(path)
    with another_process(path, "try_own") as other:
        assert not mine.try_share()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert mine.try_share()


def test_an_engine_in_another_process_keeps_the_trainer_off(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    mine = DeviceLock(path)
    with another_process(path, "try_share") as other:
        assert not mine.try_own()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert mine.try_own()


async def test_a_replica_waits_until_the_trainer_has_left(tmp_path: Path) -> None:
    trainer, replica = (DeviceLock(tmp_path / "device.lock") for _ in range(2))
    assert trainer.try_own()
    assert not await asyncio.wait_for(replica.share(within_s=0.1), PATIENCE_S)
    waiting = asyncio.create_task(replica.share())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    trainer.release()
    assert await asyncio.wait_for(waiting, PATIENCE_S)


def test_a_path_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"device\.lock") as caught:
        DeviceLock(tmp_path / "file" / "device.lock").try_own()
    assert caught.value.reason == "NO_DEVICE_LOCK"
