"""One device for engine and trainer: configs that cannot be, and whose turn it is when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from dialoop.errors import InvalidConfig, PreconditionFailed, Unavailable
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.file import parse_config
from dialoop_services.runtime.device_lock import DeviceLock
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.publish.placement import Shared, Split
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARED: dict[str, Any] = {"placement": "shared", "train": {"pipeline_depth": 0}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"placement": "shared", "train": {"pipeline_depth": 2}}, "set pipeline_depth = 0"),
        ({**SHARED, "inference": {"data_plane": "nccl"}}, "set data_plane to shared_memory"),
        (
            {
                "placement": "shared",
                "engine": "transformers",
                "train": {"pipeline_depth": 0, "device": "cuda"},
            },
            "set placement to split",
        ),
        (
            {
                "placement": "shared",
                "train": {"pipeline_depth": 0, "num_processes": 2},
            },
            "num_processes is 2",
        ),
        ({"placement": "both"}, "'split' or 'shared'"),
    ],
)
def test_a_job_that_cannot_share_a_device_is_told_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        parse_config(config, source="job.toml")


def test_sft_may_share_at_any_depth() -> None:
    job = parse_config({"placement": "shared", "train": {"mode": "sft"}}, source="job.toml")
    assert job.placement == "shared"


@pytest.mark.parametrize("unfit", [{"pipeline_depth": 1}, {"data_plane": "ipc"}])
def test_a_trainer_started_by_hand_is_told_too(unfit: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="on a shared device"):
        load(TrainerSettings, **{"pipeline_depth": 0} | unfit, device_lock=tmp_path / "lock")


def test_trainer_and_replicas_get_one_lock_and_only_where_they_share(tmp_path: Path) -> None:
    for config, expected in ((SHARED, {tmp_path / "device.lock"}), ({}, {None})):
        job = parse_config(dict(config), source="job.toml")
        run_dir = RunDir(path=tmp_path, run_id="job")
        layout = Layout(config=job, run_dir=run_dir, ports=ports_of(job, with_redis=False))
        locks = {layout.values_of(name).get("device_lock") for name in ("trainer", "inference")}
        assert locks == expected
        held_up = layout.spec("inference").is_held_up
        assert (held_up is not None) == bool(config)
        if held_up is not None:
            trainer = DeviceLock(tmp_path / "device.lock")
            assert not held_up()
            assert trainer.try_own()
            assert held_up(), "a replica that starts now waits, however long"
            trainer.release()
        assert layout.spec("trainer").is_held_up is None


class FakeReplica:
    """Holds the lock while it is awake; tells `events`."""

    def __init__(self, path: Path, events: list[str]) -> None:
        self.lock = DeviceLock(path)
        assert self.lock.try_share()
        self.events = events
        self.error: Exception | None = None

    async def sleep(self, *, drain_s: float, deadline_s: float) -> None:
        if self.error is not None:
            raise self.error
        if self.lock.is_held:
            self.events.append("asleep")
            self.lock.release()

    async def wake(self) -> None:
        assert self.lock.try_share(), "the trainer has left by now"
        self.events.append("awake")


class FakeLearner:
    """Tells where it is moved."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.ask: Callable[[], None] = lambda: None

    def move_to(self, device: str) -> None:
        self.events.append(device)

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        self.ask = ask

    def compute(self) -> None:
        self.ask()
        self.events.append("computed")


class World:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "device.lock"
        self.events: list[str] = []
        self.learner = FakeLearner(self.events)
        self.replica = FakeReplica(self.path, self.events)
        self.lock = DeviceLock(self.path)
        self.placement = Shared(
            self.lock,
            self.learner,
            [cast("Any", self.replica)],
            device="cuda",
            drain_s=1.0,
        )

    async def compute(self) -> None:
        await asyncio.to_thread(self.learner.compute)


async def test_the_trainer_computes_only_once_replicas_sleep_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.compute()
    await world.compute()
    assert world.lock.is_held
    await world.placement.leave()
    await world.placement.leave()
    assert world.events == ["asleep", "cuda", "computed", "computed", "cpu"]
    assert not world.lock.is_held


async def test_a_replica_that_cannot_be_told_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.replica.error = Unavailable("away")  # it starts, or hangs: its lock is what counts
    computing = asyncio.create_task(world.compute())
    await asyncio.sleep(0.4)
    assert world.events == []
    world.replica.lock.release()  # as when it dies
    await asyncio.wait_for(computing, PATIENCE_S)
    assert world.events == ["cuda", "computed"]


async def test_a_replica_that_does_not_share_is_no_reason_to_wait(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.replica.error = PreconditionFailed("not here", reason="SLEEP_DISABLED")
    with pytest.raises(PreconditionFailed):
        await world.compute()


async def test_evaluations_have_the_engines_awake_and_the_trainer_waits_for_them(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    between_steps = asyncio.Lock()
    await world.compute()
    world.events.clear()
    async with world.placement.engines_awake(between_steps):
        assert world.events == ["cpu", "awake"]
        assert not between_steps.locked()
        computing = asyncio.create_task(world.compute())
        await asyncio.sleep(0.05)
        assert world.events == ["cpu", "awake"]
        async with world.placement.engines_awake(between_steps):
            pass
        await asyncio.sleep(0.05)
        assert "computed" not in world.events, "one evaluation is still on"
    await asyncio.wait_for(computing, PATIENCE_S)
    assert world.events[-3:] == ["asleep", "cuda", "computed"]


async def test_a_trainer_with_its_own_device_asks_nobody() -> None:
    placement, lock = Split(), asyncio.Lock()
    await placement.leave()
    async with lock, placement.engines_awake(lock):
        pass
