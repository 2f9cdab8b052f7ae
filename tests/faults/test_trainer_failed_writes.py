"""A write of the trainer fails: it says so, leaves nothing half done, and goes on afterwards."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.trainer import Phase, TrainerClient
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.hosting.hosts import OwnProcess
from dialoop_services.replay.store import QueueLimits
from dialoop_services.trainer.__main__ import serve_in
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import recorded_world
from tests.support.waiting import PATIENCE_S


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
