"""Engine and trainer on one device: never at the same time, and the same weights as apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from dialoop.clients.trainer import Phase
from dialoop.trajectory import SamplingParams
from dialoop_ops.stack.in_process import in_process
from dialoop_services.collector.collector import Collector
from dialoop_services.inference.transformers_engine.adapters import AdaptedModel
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish.publisher import Publisher

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop import Dialoop

Interval = tuple[float, float]

# One row at a time: where rows are batched as they happen to come, sums of floats differ in their
# last digits from run to run, whatever the placement.
SMALL: dict[str, Any] = {
    "inference": {"max_model_len": 128, "max_num_seqs": 1},
    "collector": {"group_size": 2, "max_new_tokens": 6, "max_groups_in_flight": 1},
    "scorer": {"rewards": [{"name": "sum", "use": "tests.support.placement_parts:token_sum"}]},
}


class Record:
    """When each side worked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: list[Interval] = []
        self.trainer: list[Interval] = []
        self._time_calls(monkeypatch, AdaptedModel, "__call__", self.engine)
        for name in ("_update", "_scores"):
            # Inside, so that what the learner waits for the device is no work of its.
            self._time_calls(monkeypatch, Learner, name, self.trainer)

    def _time_calls(
        self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, into: list[Interval]
    ) -> None:
        work = getattr(kind, name)

        def call_timed(owner: Any, *arguments: Any, **named: Any) -> Any:
            started = time.monotonic()
            result = work(owner, *arguments, **named)
            into.append((started, time.monotonic()))
            return result

        monkeypatch.setattr(kind, name, call_timed)

    def overlaps(self) -> list[tuple[Interval, Interval]]:
        """Pairs of work at the same time."""
        assert self.engine
        assert self.trainer
        return [
            (ours, theirs)
            for ours in self.trainer
            for theirs in self.engine
            if ours[0] < theirs[1] and theirs[0] < ours[1]
        ]


async def finish(dialoop: Dialoop) -> Any:
    async with asyncio.timeout(100):
        while True:
            status = await dialoop.trainer.get_status()
            assert status.phase is not Phase.FAILED, status.failure
            if status.phase is Phase.DONE:
                return status
            await asyncio.sleep(0.02)


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


def digests(run_dir: Path) -> dict[str, str]:
    """Every published policy's bytes."""
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run_dir.glob("policies/*/model.safetensors"))
    }


async def test_shared_is_pipeline_depth_0_bit_for_bit_and_nobody_works_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, publish, is_published = Collector._lease, Publisher.publish, asyncio.Event()
    train_step = Learner.train_step

    async def publish_and_tell(publisher: Publisher, *arguments: Any, **named: Any) -> Any:
        published = await publish(publisher, *arguments, **named)
        is_published.set()
        return published

    async def lease_once_published(collector: Collector, *arguments: Any) -> Any:
        # Work is handed out a moment earlier: members whose first questions come before there is an
        # answer ask again at times of their own, in any order.
        await is_published.wait()
        return await lease(collector, *arguments)

    def train_in_one_order(learner: Learner, rows: Any) -> Any:
        # The members of a group come to the queue in any order, and a sum of floats depends on it.
        ordered = sorted(rows, key=lambda row: (row.group_index, row.token_ids.tolist()))
        members = (replace(row, trajectory_index=number % 2) for number, row in enumerate(ordered))
        return train_step(learner, list(members))

    monkeypatch.setattr(Learner, "train_step", train_in_one_order)
    monkeypatch.setattr(Publisher, "publish", publish_and_tell)
    monkeypatch.setattr(Collector, "_lease", lease_once_published)
    digests_by_placement: dict[str, dict[str, str]] = {}
    for placement in ("split", "shared"):
        is_published.clear()
        with monkeypatch.context() as patch:
            record = Record(patch)
            config = {
                **SMALL,
                "run": placement,
                "placement": placement,
                "train": {
                    "num_steps": 3,
                    "groups_per_train_step": 2,
                    "pipeline_depth": 0,
                    "learning_rate": 1e-3,
                },
            }
            async with in_process(config, folder=tmp_path) as dialoop:
                await finish(dialoop)
                run = json.loads((tmp_path / placement / "run.json").read_text("utf-8"))["run_id"]
                stats = await dialoop.replay.get_stats(run)
        assert record.overlaps() == []
        digests_by_placement[placement] = digests(tmp_path / placement)
        trained = rows(tmp_path / placement, "train")
        assert [row["num_groups_trained"] for row in trained] == [2, 2, 2]
        assert {row["staleness_max"] for row in trained} == {0}
        published = rows(tmp_path / placement, "publish")
        assert [row["policy_version"] for row in published] == [1, 2, 3, 4]
        assert all(0 <= row["max_logprob_difference"] < 1e-5 for row in published)
        assert stats.training.num_trajectories_generated >= 12
        assert not any("fail" in why for why in stats.training.num_groups_dropped)
    assert list(digests_by_placement["shared"]) == ["main-1", "main-2", "main-3", "main-4"]
    assert len(set(digests_by_placement["shared"].values())) == 4, "every step changed the weights"
    assert digests_by_placement["shared"] == digests_by_placement["split"]


async def test_sft_keeps_the_device_and_engines_wake_for_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(monkeypatch)
    config = {
        **SMALL,
        "run": "sft",
        "placement": "shared",
        "train": {"mode": "sft", "num_steps": 30, "learning_rate": 1e-3},
        "sft": {"batch_size": 4},
        "evaluation": {"num_tasks": 2, "every": 10, "num_running_tasks": 2},
    }
    async with in_process(config, folder=tmp_path) as dialoop:
        reasons, evaluating = set(), None
        while (status := await dialoop.trainer.get_status()).phase is not Phase.DONE:
            assert status.phase is not Phase.FAILED, status.failure
            reasons.add((await dialoop.inference.get_policy()).reason)
            if status.num_train_steps >= 2 and evaluating is None:
                sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
                evaluating = asyncio.create_task(
                    dialoop.trainer.evaluate(
                        "arithmetic", split="heldout", max_tasks=1, sampling=sampling, label="asked"
                    )
                )
            await asyncio.sleep(0.01)
        assert evaluating is not None
        assert (await evaluating).num_trajectories == 1
        assert (await dialoop.inference.get_policy()).ready
    assert reasons == {"ASLEEP", ""}
    assert record.overlaps() == []
    labels = [row["label"] for row in rows(tmp_path / "sft", "evaluation")]
    assert labels.count("running") == 2
    assert "asked" in labels
    assert [row["num_failed"] for row in rows(tmp_path / "sft", "evaluation")] == [0] * len(labels)


async def test_a_publish_at_any_moment_costs_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(monkeypatch)
    config = {
        **SMALL,
        "run": "often",
        "placement": "shared",
        "inference": {"max_model_len": 128, "max_num_seqs": 4},
        "collector": {"group_size": 4, "max_new_tokens": 24, "max_groups_in_flight": 2},
        "train": {
            "num_steps": 3,
            "groups_per_train_step": 2,
            "pipeline_depth": 0,
            "max_staleness": 1000,
        },
    }
    async with in_process(config, folder=tmp_path) as dialoop:
        run = json.loads((tmp_path / "often" / "run.json").read_text("utf-8"))["run_id"]
        num_published = 0
        while (await dialoop.trainer.get_status()).phase is not Phase.DONE:
            published = await dialoop.trainer.publish()
            num_published += 1
            assert published.max_logprob_difference < 1e-4
            await asyncio.sleep(0.1)
        stats = await dialoop.replay.get_stats(run)
    assert num_published >= 3
    assert record.overlaps() == []
    assert stats.training.num_groups_dropped == {}
    assert stats.training.num_trajectories_consumed >= 3 * 2 * 4
    collected = json.loads(next((tmp_path / "often").glob("collector-*.json")).read_text("utf-8"))
    assert collected["num_failures"] == {}
