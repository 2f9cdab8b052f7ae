"""A trainer that is away for longer than its leases, over and over, still finds what it held."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.replay.store import Answer, QueueLimits

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import (
    GROUPS_PER_STEP,
    Recorded,
    Trainers,
    record_groups,
    recorded_world,
    trainers,
)
from tests.support.samples.replay_samples import Clock

NUM_STEPS = 4
SETTINGS: dict[str, Any] = {"num_steps": NUM_STEPS, "checkpoint_every": 100, "lease_s": 60}


class HoldingStore(ModelStore):
    """Keeps a trainer waiting for ever at a point of the test's choice, so that it dies there."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(QueueLimits(), clock=clock)
        self.holds_version = 0
        self.holds_reopened = False
        self.is_holding = False

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        is_publish = isinstance(request, pb.AdvancePolicyRequest)
        if is_publish and request.policy_version.number == self.holds_version:
            await self._hold()
        response = await super().apply(request, answer)
        if isinstance(request, pb.ReopenLeasesRequest) and self.holds_reopened:
            await self._hold()
        return response

    async def _hold(self) -> None:
        self.is_holding = True
        await asyncio.Event().wait()


async def killed_when_held(world: Recorded, start: Trainers, store: HoldingStore) -> None:
    store.is_holding = False
    trainer = start.start(world.environment(**SETTINGS), world.run_dir / "log")
    await trainer.until(lambda: store.is_holding)
    trainer.kill()


@pytest.mark.heavy(reason="starts five trainers, one after the other")
@pytest.mark.timeout(900)
async def test_a_trainer_away_for_longer_than_its_leases_and_killed_in_each_recovery_loses_no_group(
    tmp_path: Path,
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    clock = Clock()
    store = HoldingStore(clock)
    groups = record_groups(model_dir, NUM_STEPS * GROUPS_PER_STEP)
    async with recorded_world(tmp_path / "world", model_dir, store, groups) as world:
        with trainers(are_forked=True) as start:
            # Dies after it has written its third step down, and before anybody heard of it.
            store.holds_version = 4
            await killed_when_held(world, start, store)
            store.holds_version, store.holds_reopened = 0, True
            for _ in range(QueueLimits().max_deliveries):
                clock.pass_s(1000)
                await killed_when_held(world, start, store)
            clock.pass_s(1000)
            store.holds_reopened = False
            trainer = start.start(world.environment(**SETTINGS), world.run_dir / "log")
            await trainer.until((world.run_dir / "trainer.json").is_file)
            trainer.stop()
        stats = await world.replay.get_stats(world.run)
    assert stats.num_dead_letters == 0
    assert [row["train_step"] for row in world.train_rows] == [1, 2, 3, 4]
    assert {row["lineage"] for row in world.train_rows} == {"main"}
    dropped = sum(stats.training.num_groups_dropped.values())
    assert stats.training.num_groups_consumed + dropped == len(groups)
    assert set(stats.training.num_groups_dropped) <= {"uniform_reward"}
