"""A write of the trainer fails or is cut: it says so, leaves nothing half done, and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.trainer import Phase, TrainerClient
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import Group
from dialoop_learning.model.tiny import make_tiny_model, tiny_config, write_tokenizer
from dialoop_services.hosting.hosts import OwnProcess
from dialoop_services.replay.store import QueueLimits
from dialoop_services.trainer.__main__ import serve_in
from dialoop_services.trainer.settings import TrainerSettings
from transformers import Qwen2ForCausalLM

from tests.faults.test_trainer_ranks import ROOT, Trainer, train
from tests.faults.test_trainer_reproducible import is_saving
from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    Recorded,
    record_groups,
    recorded_world,
)
from tests.support.waiting import PATIENCE_S

NUM_STEPS = 6
WORKER = ROOT / "tests" / "support" / "programs" / "saving_worker.py"


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """The system refuses longer files of this process, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_failed_writes_are_named_and_the_next_publish_and_checkpoint_work(
    tmp_path: Path,
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), []) as world:
        settings = TrainerSettings(
            port=0,
            run=world.run,
            run_dir=world.run_dir,
            model_dir=model_dir,
            replay_address=world.replay_address,
            inference_addresses=[world.inference_address],
            evaluation={"num_tasks": 0},
            num_steps=0,
        )
        host = OwnProcess(settings)
        running = asyncio.create_task(serve_in(host, settings))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not host.server.address.rpartition(":")[2].strip("0"):
                    await asyncio.sleep(0.01)
                async with Channel(host.server.address) as channel:
                    client = TrainerClient(channel)
                    while (await client.get_status()).phase is not Phase.DONE:
                        await asyncio.sleep(0.02)
                    before = await client.publish()
                    with files_limited_to(1_000_000):
                        for call in (client.publish, client.checkpoint):
                            with pytest.raises(
                                PreconditionFailed, match="File too large"
                            ) as caught:
                                await call()
                            assert caught.value.reason is Reason.WRITE_FAILED
                    after = await client.publish()
                    assert after.policy_version.number > before.policy_version.number
                    await client.checkpoint()
        finally:
            host.server.stop()
            await running
    assert not list(world.run_dir.rglob("*.tmp"))
    checkpoints = [path for path in (world.run_dir / "checkpoints").iterdir() if path.is_dir()]
    assert len(checkpoints) == 2
    assert all((path / "progress.json").is_file() for path in checkpoints)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 15 million parameters: its checkpoint is not written in a moment."""
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 512, 1536, 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def groups(large_model: Path) -> list[Group]:
    return record_groups(large_model, GROUPS_PER_STEP * NUM_STEPS)


def newest(world: Recorded) -> Path:
    root = world.run_dir / "checkpoints"
    return root / str(json.loads((root / "latest.json").read_text("utf-8"))["name"])


def num_saved_steps(world: Recorded) -> int:
    pointer = world.run_dir / "checkpoints" / "latest.json"
    return int(newest(world).name[-6:]) if pointer.is_file() else -1


async def num_consumed(world: Recorded) -> int:
    return (await world.replay.get_stats(world.run)).training.num_groups_consumed


@pytest.mark.heavy(reason="starts trainers of several processes")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["while it is written", "once it is whole"])
async def test_ranks_killed_around_a_save_lose_nothing_and_train_nothing_twice(
    tmp_path: Path, large_model: Path, groups: list[Group], moment: str
) -> None:
    is_half = moment == "while it is written"
    async with recorded_world(tmp_path, large_model, ModelStore(QueueLimits()), groups) as world:
        trainer = Trainer(world, size=2, num_steps=NUM_STEPS, checkpoint_every=3)
        try:
            await trainer.until(lambda: num_saved_steps(world) == 0)
            pids = [*trainer.ranks().values(), trainer.process.pid]
            while not (is_saving(world, 1) if is_half else num_saved_steps(world) == 3):
                assert num_saved_steps(world) <= 3
                assert trainer.process.poll() is None
                await asyncio.sleep(0)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            trainer.process.wait()
            consumed = await num_consumed(world)
        finally:
            trainer.process.kill()
        assert (newest(world) / "parts").is_dir()
        assert num_saved_steps(world) == (0 if is_half else 3), "it was quicker than the kill"
        assert consumed in ((0,) if is_half else (0, 3 * GROUPS_PER_STEP))
        await train(world, size=2, num_steps=NUM_STEPS, checkpoint_every=3)
        assert await num_consumed(world) == NUM_STEPS * GROUPS_PER_STEP
        stats = await world.replay.get_stats(world.run)
    progress = json.loads((newest(world) / "progress.json").read_text("utf-8"))
    assert progress["num_train_steps"] == NUM_STEPS
    assert progress["num_trained_trajectories"] == GROUP_SIZE * GROUPS_PER_STEP * NUM_STEPS
    assert stats.num_dead_letters == 0
    assert progress["policy_version"]["lineage"] == "main"  # all steps were repeated


@pytest.mark.heavy(reason="starts trainers of several processes")
@pytest.mark.timeout(900)
async def test_a_rank_whose_disk_is_full_ends_all_with_its_reason_and_nothing_is_acknowledged(
    tmp_path: Path, large_model: Path, groups: list[Group]
) -> None:
    async with recorded_world(tmp_path, large_model, ModelStore(QueueLimits()), groups) as world:
        reason = tmp_path / "reason.json"
        trainer = Trainer(world, size=2, num_steps=NUM_STEPS, checkpoint_every=3, reason=reason)
        try:
            await trainer.until(lambda: num_saved_steps(world) == 0)
            limit = (1_000_000, resource.RLIM_INFINITY)
            resource.prlimit(trainer.ranks()[1], resource.RLIMIT_FSIZE, limit)
            assert await trainer.end() == 1
        finally:
            trainer.process.kill()
        trainer.log.rename(tmp_path / "log of the failed")
        told = json.loads(reason.read_text("utf-8"))
        assert "parts could not be written: File too large." in told["message"]
        assert num_saved_steps(world) == 0
        assert await num_consumed(world) == 0
        await train(world, size=2, num_steps=NUM_STEPS)
        assert await num_consumed(world) == NUM_STEPS * GROUPS_PER_STEP


@pytest.mark.heavy(reason="starts trainers of several processes")
@pytest.mark.timeout(900)
def test_a_rank_needs_its_part_of_the_state_once_more_and_never_the_whole(tmp_path: Path) -> None:
    """Peak memory of each of two ranks while a checkpoint is copied and written."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    python_path = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    ended = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(WORKER), str(tmp_path / "parts")],
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        check=True,
        text=True,
    )
    for grown, part in json.loads(ended.stdout):
        assert part > 200 << 20
        assert grown < 1.2 * part + (32 << 20)
