"""The queue loses the end of its file: what was trained stays trained, and the rest comes again."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import Unavailable
from dialoop.trajectory import Group, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import Answer, QueueLimits

from tests.support.recorded_world import (
    FIRST,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    Recorded,
    record_groups,
    recorded_world,
    trainers,
)
from tests.support.redis_server import RedisServer, own_redis  # noqa: F401
from tests.support.replay_store_world import ack, lease, names_of
from tests.support.samples.replay_samples import (
    Clock,
    announce,
    append_member,
    assert_adds_up,
    lease_tasks,
    make_task,
    offer_tasks,
    stats_of,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.redis
RUN = "run"
NUM_STEPS = 6
CUT_AT = 5
LONGER_THAN_A_LEASE_S = 1000.0
CHECKPOINT_EVERY = 2
SETTINGS: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "checkpoint_every": CHECKPOINT_EVERY,
    "lease_s": 60,
}


def queue_file(folder: Path) -> Path:
    """Redis's append-only file; from Redis 7 on it has a number and a folder of its own."""
    (file,) = folder.rglob("*.aof")
    return file


def lose_power(server: RedisServer, folder: Path, size: int) -> None:
    """Kill Redis, cut its file to an earlier size, and start it again."""
    server.kill()
    assert size < queue_file(folder).stat().st_size
    os.truncate(queue_file(folder), size)
    server.start()


class LosingStore(RedisStore):
    """Once armed: at the announcement of version CUT_AT it loses all since the first checkpoint.

    What is lost begins with the announcement before the checkpoint, whose acknowledgement comes
    beside the steps that follow. `holds`: the trainer waits at CUT_AT for ever, so that it goes
    down with the queue.
    """

    def __init__(self, server: RedisServer, folder: Path, *, holds: bool) -> None:
        self.clock = Clock()
        super().__init__(server.url, QueueLimits(), timeout_s=PATIENCE_S, clock=self.clock)
        self._server, self._folder, self._holds = server, folder, holds
        self.is_armed = self.is_holding = False
        self._size: int | None = None
        self.lost_acknowledgements: list[str] = []

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        if self.is_armed and isinstance(request, pb.AcknowledgeRequest):
            leases = [i.lease_id for i in request.items if i.outcome == pb.OUTCOME_CONSUMED]
            self.lost_acknowledgements += leases
        is_publish = self.is_armed and isinstance(request, pb.AdvancePolicyRequest)
        if is_publish and request.policy_version.number == FIRST.number + CHECKPOINT_EVERY:
            self._size = queue_file(self._folder).stat().st_size
        if is_publish and request.policy_version.number == CUT_AT:
            self.is_holding = self._holds
            if self._holds:
                await asyncio.Event().wait()
            self.lose_power()
        return await super().apply(request, answer)

    def lose_power(self) -> None:
        """Come back as it was, after so long that every lease has run out."""
        assert self._size is not None
        self.is_armed = False
        lose_power(self._server, self._folder, self._size)
        self.clock.pass_s(LONGER_THAN_A_LEASE_S)


def progress_of(world: Recorded) -> dict[str, Any]:
    """The job's state in the newest checkpoint."""
    root = world.run_dir / "checkpoints"
    name = json.loads((root / "latest.json").read_text())["name"]
    progress: dict[str, Any] = json.loads((root / name / "progress.json").read_text())
    return progress


def with_signal(groups: list[Group]) -> list[str]:
    """The groups that a train step takes, in the queue's order."""
    return [g.group_id for g in groups if any(t.sequences[0].advantage for t in g.trajectories)]


async def num_left(world: Recorded) -> int:
    """Groups that wait for a train step or are in one."""
    counts = (await world.replay.get_stats(world.run)).training
    return counts.num_groups_scored + counts.num_groups_training + counts.num_groups_trained


@pytest.mark.heavy(reason="trains in a process of its own, some ten seconds")
@pytest.mark.timeout(400)
async def test_a_trainer_trains_nothing_twice_after_the_queue_lost_its_last_second(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    # As many as the steps take: were one trained twice, another would never be.
    groups = record_groups(model_dir, NUM_STEPS * GROUPS_PER_STEP)
    store = LosingStore(own_redis, tmp_path, holds=False)
    async with recorded_world(tmp_path / "world", model_dir, store, groups) as world:
        store.is_armed = True
        with trainers(are_forked=True) as start:
            trainer = start.start(world.environment(**SETTINGS), world.run_dir / "log")
            await trainer.until((world.run_dir / "trainer.json").is_file)
            trainer.stop()
        stats = await world.replay.get_stats(world.run)
    assert not store.is_armed, "the power was never lost"
    assert store.lost_acknowledgements
    progress = progress_of(world)
    assert set(progress["consumed_group_ids"]) == set(with_signal(groups))
    assert progress["num_trained_trajectories"] == GROUP_SIZE * GROUPS_PER_STEP * NUM_STEPS
    assert progress["policy_version"]["lineage"] == FIRST.lineage
    assert stats.num_dead_letters == 0


@pytest.mark.heavy(reason="trains in two processes, some ten seconds")
@pytest.mark.timeout(400)
async def test_a_trainer_that_lost_power_with_its_queue_acknowledges_again_and_trains_nothing_twice(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    groups = record_groups(model_dir, NUM_STEPS * GROUPS_PER_STEP)
    store = LosingStore(own_redis, tmp_path, holds=True)
    async with recorded_world(tmp_path / "world", model_dir, store, groups) as world:
        store.is_armed = True
        environment, log = world.environment(**SETTINGS), world.run_dir / "log"
        with trainers(are_forked=True) as start:
            first = start.start(environment, log)
            # Its checkpoint is whole by then; a kill before that takes all steps back.
            await first.until(lambda: store.is_holding and store.lost_acknowledgements)
            first.kill()
            store.lose_power()
            second = start.start(environment, log)
            # The queue lost the leases of the steps since the checkpoint, so these are taken back.
            # What is left was sampled in the lineage that ended there, and is dropped.
            while await num_left(world):
                assert second.is_alive, log.read_text()[-4000:]
                await asyncio.sleep(0.05)
            second.stop()
        stats = await world.replay.get_stats(world.run)
    in_checkpoint = with_signal(groups)[: GROUPS_PER_STEP * CHECKPOINT_EVERY]
    progress = progress_of(world)
    assert sorted(progress["consumed_group_ids"]) == sorted(in_checkpoint)
    assert progress["num_trained_trajectories"] == GROUP_SIZE * len(in_checkpoint)
    assert progress["policy_version"]["lineage"] != FIRST.lineage
    assert stats.training.num_groups_consumed == len(in_checkpoint)
    assert sum(stats.training.num_groups_dropped.values()) == len(groups) - len(in_checkpoint)
    assert stats.num_dead_letters == 0


async def test_appends_and_offers_that_a_power_loss_took_are_made_again_under_their_own_ids(
    tmp_path: Path,
    own_redis: RedisServer,
) -> None:
    clock = Clock()
    store = RedisStore(own_redis.url, QueueLimits(), timeout_s=PATIENCE_S, clock=clock)
    await announce(store, RUN)
    await offer_tasks(store, RUN, [make_task("a")], "", "0:1")
    (held,) = (await lease_tasks(store, RUN)).leases
    assert not (await append_member(store, RUN, held.lease_id, 0)).reason
    size = queue_file(tmp_path).stat().st_size
    assert not (await append_member(store, RUN, held.lease_id, 1)).reason
    assert (await offer_tasks(store, RUN, [make_task("b")], "0:1", "0:2")).num_new == 1
    lose_power(own_redis, tmp_path, size)
    with pytest.raises(Unavailable):  # the connection is the old server's
        await stats_of(store, RUN)
    stats = await stats_of(store, RUN)
    assert (stats.cursor, stats.training.num_trajectories_generated) == ("0:1", 1)
    clock.pass_s(LONGER_THAN_A_LEASE_S)
    (again,) = (await lease_tasks(store, RUN)).leases
    assert (again.task.task_id, list(again.members)) == ("a", [1])
    outcome = await append_member(store, RUN, again.lease_id, 1)
    assert outcome.status == pb.APPEND_STATUS_APPENDED
    assert (await offer_tasks(store, RUN, [make_task("b")], "0:1", "0:2")).num_new == 1
    (group,) = (await lease(store, RUN, Stage.UNSCORED)).leases
    assert names_of([group]) == ["a"]
    assert await ack(store, RUN, group.lease_id, "read") == ""
    stats = await stats_of(store, RUN)
    assert_adds_up(stats)
    assert stats.training.num_trajectories_generated == 2
    assert stats.training.num_tasks_offered == 1
    await store.close()
