"""On recorded groups a trainer's bits are always the same, also when it is killed on the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.stack.report.plot import read_metrics
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits, QueueStore

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import (
    GROUPS_PER_STEP,
    Recorded,
    Trainers,
    record_groups,
    recorded_world,
    trainers,
    without_times,
)
from tests.support.redis_server import redis_url  # noqa: F401

ROUNDING = 1e-5
"""Nats by which engine and trainer may differ in float32."""
NUM_STEPS = 8
NUM_KILLS = 8
SETTINGS = {"num_steps": NUM_STEPS, "checkpoint_every": 3, "learning_rate": 3e-3}


def is_done(world: Recorded) -> bool:
    return (world.run_dir / "trainer.json").is_file()


def is_saving(world: Recorded, num_saved: int) -> bool:
    """Whether a checkpoint is half written while the pointer names an older one."""
    root = world.run_dir / "checkpoints"
    names = {path.name for path in root.iterdir() if path.is_dir()} if root.is_dir() else set()
    return len(names) > num_saved and any(
        not (root / name / "progress.json").is_file() for name in names
    )


def memory_store() -> QueueStore:
    return ModelStore(QueueLimits())


def read_rows(world: Recorded) -> list[dict[str, object]]:
    """The rows of train steps that readers of metrics.jsonl see."""
    kept = read_metrics(world.run_dir / "metrics.jsonl")
    return [without_times(row) for row in kept if row["kind"] == "train"]


def digests(world: Recorded) -> dict[str, str]:
    """SHA-256 of what the final checkpoint holds of the learner."""
    root = world.run_dir / "checkpoints"
    newest = root / json.loads((root / "latest.json").read_text())["name"]
    files = (path for path in newest.rglob("*") if path.is_file())
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name not in ("progress.json", "journal.jsonl")
    }


def progress_of(world: Recorded) -> dict[str, object]:
    root = world.run_dir / "checkpoints"
    newest = root / json.loads((root / "latest.json").read_text())["name"]
    progress = json.loads((newest / "progress.json").read_text())
    # The probe of a publish is measured anew after a kill, beside other requests: rounding differs.
    assert progress["max_logprob_difference"] < ROUNDING
    # Groups of an earlier checkpoint stay listed until the next: harmless, and not the same.
    volatile = (
        "phase_seconds",
        "consumed_lease_ids",
        "consumed_group_ids",
        "max_logprob_difference",
    )
    return {name: value for name, value in progress.items() if name not in volatile}


async def train_through(world: Recorded, start: Trainers, **settings: Any) -> None:
    """From the first step to the last in one process."""
    trainer = start.start(world.environment(**SETTINGS, **settings), world.run_dir / "log")
    await trainer.until(lambda: is_done(world), every_s=0.02)
    trainer.stop()


async def train_with_kills(world: Recorded, start: Trainers, **settings: Any) -> None:
    """Killed with steps behind its checkpoint, then while it writes the next one."""
    environment, log = world.environment(**SETTINGS, **settings), world.run_dir / "log"
    first = start.start(environment, log)
    await first.until(lambda: len(world.train_rows) >= 5, every_s=0.0)
    first.kill()
    assert len(world.train_rows) in (5, 6)
    second = start.start(environment, log)
    await second.until(lambda: is_saving(world, 2), every_s=0.0)
    second.kill()
    assert is_saving(world, 2), "it was quicker than the kill"
    await train_through(world, start, **settings)


def num_serving(log: Path) -> int:
    """How often a trainer has come up."""
    return log.read_text().count("Serving.") if log.is_file() else 0


def num_restores(world: Recorded) -> int:
    """How often a trainer has continued from a checkpoint."""
    return [row["kind"] for row in world.metrics].count("restore")


async def train_with_many_kills(world: Recorded, start: Trainers) -> None:
    """Killed over and over, whatever it is doing."""
    environment, log = world.environment(**SETTINGS), world.run_dir / "log"
    moments = random.Random(1)
    for number in range(NUM_KILLS):
        num_up, num_restored = num_serving(log), num_restores(world)
        trainer = start.start(environment, log)
        await trainer.until(partial(lambda before: num_serving(log) > before, num_up), every_s=0.0)
        if world.metrics and number % 4:  # else it may be killed before it has restored, too
            await trainer.until(partial(lambda before: num_restores(world) > before, num_restored))
        await asyncio.sleep(moments.uniform(0.0, 0.8))
        trainer.kill()
    await train_through(world, start)


Train = Callable[[Recorded, Trainers], Coroutine[Any, Any, None]]


async def compare(
    tmp_path: Path, store: Callable[[], QueueStore], *trains: Train, are_forked: bool
) -> list[Recorded]:
    """The worlds of runs side by side, of which the first goes undisturbed and all end alike."""
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    groups = record_groups(model_dir, NUM_STEPS * GROUPS_PER_STEP)
    async with AsyncExitStack() as exits:
        start = exits.enter_context(trainers(are_forked=are_forked))
        worlds = [
            await exits.enter_async_context(
                recorded_world(tmp_path / str(number), model_dir, store(), groups)
            )
            for number in range(len(trains))
        ]
        async with asyncio.TaskGroup() as together:
            for train, world in zip(trains, worlds, strict=True):
                together.create_task(train(world, start))
        stats = [await world.replay.get_stats(world.run) for world in worlds]
    for world, counted in zip(worlds[1:], stats[1:], strict=True):
        assert digests(world) == digests(worlds[0])
        assert read_rows(world) == read_rows(worlds[0])
        assert progress_of(world) == progress_of(worlds[0])
        assert counted.training == stats[0].training
        assert counted.num_dead_letters == 0
    assert set(digests(worlds[0])) & {"model.safetensors", "adapter_model.safetensors"}
    assert "learner.pt" in digests(worlds[0])
    assert [row["train_step"] for row in read_rows(worlds[0])] == list(range(1, NUM_STEPS + 1))
    assert stats[0].training.num_groups_dropped["uniform_reward"] > 0
    return worlds


@pytest.mark.heavy(reason="trains three times, half a minute")
@pytest.mark.timeout(600)
async def test_a_killed_trainer_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    trains = (train_through, train_with_kills)
    _, killed = await compare(tmp_path, memory_store, *trains, are_forked=True)
    assert killed.train_rows == read_rows(killed), "no step has a second row"
    assert [row["kind"] for row in killed.metrics].count("restore") == 2
    assert {row["lineage"] for row in killed.train_rows} == {"main"}


@pytest.mark.heavy(reason="kills a trainer of adapters, as the test above one of all weights")
@pytest.mark.timeout(600)
async def test_a_killed_trainer_of_adapters_redoes_them_too(tmp_path: Path) -> None:
    lora = {"lora_rank": 4}
    trains = tuple(partial(train, model=lora) for train in (train_through, train_with_kills))
    _, killed = await compare(tmp_path, memory_store, *trains, are_forked=True)
    assert [row["kind"] for row in killed.metrics].count("restore") == 2
    assert {row["lineage"] for row in killed.train_rows} == {"main"}


@pytest.mark.heavy(reason="kills a trainer over and over, on Redis")
@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_a_trainer_may_be_killed_at_any_moment(tmp_path: Path, redis_url: str) -> None:
    def store() -> QueueStore:
        return RedisStore(redis_url, QueueLimits(max_deliveries=1000))

    trains = (train_through, train_with_many_kills)
    _, killed = await compare(tmp_path, store, *trains, are_forked=True)
    assert killed.train_rows == read_rows(killed)
    assert num_restores(killed) > NUM_KILLS // 2


@pytest.mark.heavy(reason="starts five trainers, each of which imports torch")
@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_processes_of_their_own_agree_bit_by_bit_on_redis(
    tmp_path: Path, redis_url: str
) -> None:
    def store() -> QueueStore:
        return RedisStore(redis_url, QueueLimits())

    trains = (train_through, train_through, train_with_kills)
    await compare(tmp_path, store, *trains, are_forked=False)
