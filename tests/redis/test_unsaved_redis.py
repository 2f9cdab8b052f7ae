"""The queue of `store = "memory"`: kept by a clean stop, and by nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from dialoop.errors import Unavailable
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1.replay_service_pb2_grpc import ReplayServiceStub
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits
from dialoop_services.replay.unsaved_redis import unsaved_redis

from tests.support.replay_store_world import ack, lease, ready_to_train
from tests.support.samples.replay_samples import announce, offer, play, stats_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.redis
RUN = "run"


def ignore() -> None:
    """Do nothing."""


@asynccontextmanager
async def queue_in(folder: Path | None) -> AsyncIterator[RedisStore]:
    async with unsaved_redis(folder, on_end=ignore) as url:
        store = RedisStore(url, QueueLimits())
        yield store
        await store.close()


async def test_a_clean_stop_keeps_the_queue_for_the_next_start(tmp_path: Path) -> None:
    snapshot = tmp_path / "run" / "queue.rdb"
    async with queue_in(snapshot.parent) as store:
        assert not snapshot.exists()
        await announce(store, RUN)
        await ready_to_train(store, RUN, "a")
        await offer(store, RUN, "b", "c")
        await play(store, RUN)
        (held,) = (await lease(store, RUN, Stage.SCORED)).leases
        before = await stats_of(store, RUN)
    assert snapshot.stat().st_size > 0
    async with queue_in(snapshot.parent) as store:
        assert not snapshot.exists(), "a queue that is lost from now on is not read from it"
        after = await stats_of(store, RUN)
        for stats in (before, after):
            for purpose in (stats.training, stats.evaluation):
                purpose.ClearField("oldest_s")
        assert after == before
        assert await ack(store, RUN, held.lease_id) == ""
    async with queue_in(snapshot.parent) as store:
        assert (await stats_of(store, RUN)).training.num_groups_consumed == 1


async def test_without_a_folder_nothing_is_kept() -> None:
    for _ in range(2):
        async with queue_in(None) as store:
            assert await offer(store, RUN, "a") == 1


class Service:
    """A replay service in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = {"STORE": "memory", "RUN_DIR": str(folder), "PORT": str(port)}
        variables = {f"DIALOOP_REPLAY_{name}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dialoop_services.replay"],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        grpc.channel_ready_future(self._channel).result(timeout=PATIENCE_S)
        self._stub = ReplayServiceStub(self._channel)
        (self.redis,) = self._children()

    def offer(self) -> int:
        """Offer a task; return how many are new."""
        task: dict[str, Any] = {"task_id": "a", "purpose": 1, "num_trajectories": 2}
        answer = self._stub.OfferTasks(pb.OfferTasksRequest(run=RUN, tasks=[task]))
        return int(answer.num_new)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal to the whole group, as a terminal does; return what came of it."""
        os.killpg(self.process.pid, number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for its end, and for that of its Redis."""
        _, complaint = self.process.communicate(timeout=PATIENCE_S)
        self._channel.close()
        end = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{self.redis}").exists():
            assert time.monotonic() < end, "its Redis goes on"
            time.sleep(0.01)
        return self.process.returncode, complaint

    def _children(self) -> list[int]:
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run, with a queue of one task from an earlier start."""
    service = Service(tmp_path)
    assert service.offer() == 1
    assert service.end(signal.SIGINT)[0] == 0
    return tmp_path


def test_a_queue_outlives_ctrl_c_and_no_kill(folder: Path) -> None:
    """An older snapshot would bring back work that was done since."""
    service = Service(folder)
    assert service.offer() == 0
    assert service.end(signal.SIGKILL)[0] == -signal.SIGKILL
    service = Service(folder)
    assert service.offer() == 1
    service.end(signal.SIGTERM)


def test_a_killed_redis_ends_the_service_which_says_so(folder: Path) -> None:
    service = Service(folder)
    os.kill(service.redis, signal.SIGKILL)
    code, complaint = service.wait()
    assert code == 1
    assert 'The Redis of store = "memory" has ended, and its queue is lost.' in complaint
    assert not (folder / "queue.rdb").exists()


def test_a_redis_that_is_asked_to_end_saves_its_queue(folder: Path) -> None:
    """Service managers signal every process of a service."""
    service = Service(folder)
    os.kill(service.redis, signal.SIGTERM)
    assert service.wait()[0] == 0
    service = Service(folder)
    assert service.offer() == 0
    service.end(signal.SIGTERM)


async def offer_in(folder: Path | None, *, removed: bool = False) -> None:
    async with queue_in(folder) as store:
        await offer(store, RUN, "a")
        if removed and folder is not None:
            folder.rmdir()


async def test_a_snapshot_that_cannot_be_read_is_named_and_stays(tmp_path: Path) -> None:
    snapshot = tmp_path / "queue.rdb"
    snapshot.write_bytes(b"REDIS9999 of another version")
    with pytest.raises(Unavailable, match="does not start: Fatal error loading") as caught:
        await offer_in(tmp_path)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert str(snapshot) in str(caught.value.remedy)
    assert snapshot.exists()


async def test_a_queue_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot save its queue"):
        await offer_in(tmp_path / "run", removed=True)
