"""SFT, LoRA and an orderly stop among real services, in one process."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from dialoop import Dialoop
from dialoop.clients.trainer import Phase
from dialoop.trajectory import Group
from dialoop_ops.policies.rescore import rescore
from dialoop_ops.stack.in_process import in_process
from safetensors.torch import load_file

SMALL = {
    "run": "small",
    "inference": {"max_model_len": 128},
    "collector": {"group_size": 2, "max_new_tokens": 8},
}
ROUNDING = 0.15
"""Nats between formats, at most, of random ids; 3e-3 is the mean (tests.support.engine_gates)."""


def differing(group: Group) -> list[float]:
    """A reward by place, so that every group trains."""
    return [float(place) for place in range(group.num_trajectories)]


async def until(dialoop: Dialoop, phase: Phase, *, num_train_steps: int = 0) -> Any:
    async with asyncio.timeout(60):
        while True:
            status = await dialoop.trainer.get_status()
            assert status.phase is not Phase.FAILED, status.failure
            if status.phase >= phase and status.num_train_steps >= num_train_steps:
                return status
            await asyncio.sleep(0.02)


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


async def test_sft_trains_evaluates_and_publishes_without_playing_training_tasks(
    tmp_path: Path,
) -> None:
    config = {
        **SMALL,
        "train": {"mode": "sft", "num_steps": 4, "learning_rate": 1e-3},
        "sft": {"batch_size": 4},
        "evaluation": {"num_tasks": 2, "every": 2, "num_running_tasks": 2},
        "trackers": {"tensorboard": True},
    }
    async with in_process(config, folder=tmp_path) as dialoop:
        await until(dialoop, Phase.DONE)
        stats = await dialoop.replay.get_stats("small")
    run_dir = tmp_path / "small"
    assert [row["train_step"] for row in rows(run_dir, "train")] == [1, 2, 3, 4]
    assert [row["label"] for row in rows(run_dir, "evaluation")] == [
        *("before_greedy", "before_sampled", "running", "after_greedy", "after_sampled")
    ]
    published = rows(run_dir, "publish")
    assert [row["train_step"] for row in published] == [0, 2, 4]
    assert max(row["max_logprob_difference"] for row in published) < 1e-4
    assert stats.training.num_trajectories_generated == 0
    assert list((run_dir / "tensorboard").iterdir())


async def test_a_stopped_lora_job_has_saved_every_step_it_took_and_goes_on(tmp_path: Path) -> None:
    config = {
        **SMALL,
        "model": {"lora_rank": 2},
        "scorer": {"rewards": [{"name": "place", "use": f"{__name__}:differing"}]},
        "warm_start": {"num_steps": 2, "batch_size": 4},
        "train": {
            "num_steps": 100,
            "groups_per_train_step": 1,
            "pipeline_depth": 1,
            "checkpoint_every": 100,
        },
        "evaluation": {"num_tasks": 0},
    }
    run_dir = tmp_path / "small"
    async with in_process(config, folder=tmp_path) as dialoop:
        await until(dialoop, Phase.TRAINING, num_train_steps=2)
    taken = rows(run_dir, "train")[-1]["train_step"]
    async with in_process(config, folder=tmp_path) as dialoop:
        status = await until(dialoop, Phase.TRAINING, num_train_steps=taken + 1)
    assert status.num_warm_start_steps == 2
    assert status.num_parameters < 100_000
    assert [row["train_step"] for row in rows(run_dir, "restore")] == [taken]
    steps = [row["train_step"] for row in rows(run_dir, "train")]
    assert steps == list(range(1, len(steps) + 1))
    published = rows(run_dir, "publish")
    assert max(row["max_logprob_difference"] for row in published) < 1e-4
    # Adapters alone were published, and they and the base are every policy there was.
    assert not list((run_dir / "policies").glob("*/model.safetensors"))
    assert max(row["num_bytes"] for row in published) < 200_000
    scores = await asyncio.to_thread(rescore, run_dir, run_dir / "model")
    assert scores["num_tokens"] > 0
    assert scores["max_difference"] < 1e-4


async def test_an_engine_in_half_precision_serves_what_a_trainer_in_whole_publishes(
    tmp_path: Path,
) -> None:
    config = {
        **SMALL,
        "inference": {"max_model_len": 128, "dtype": "bfloat16"},
        "scorer": {"rewards": [{"name": "place", "use": f"{__name__}:differing"}]},
        "warm_start": {"num_steps": 10, "batch_size": 8},
        "train": {"num_steps": 2, "groups_per_train_step": 1, "autocast": "bfloat16"},
        "evaluation": {"num_tasks": 0},
    }
    run_dir = tmp_path / "small"
    async with in_process(config, folder=tmp_path) as dialoop:
        await until(dialoop, Phase.DONE)
        policy = await dialoop.inference.get_policy()
    assert policy.policy_version is not None
    weights = load_file(run_dir / "policies" / str(policy.policy_version) / "model.safetensors")
    # Matrices come as the engine computes with them, and the norms' vectors as they are.
    kinds = {tensor.ndim > 1: tensor.dtype for tensor in weights.values()}
    assert kinds == {True: torch.bfloat16, False: torch.float32}
    published = [row["max_logprob_difference"] for row in rows(run_dir, "publish")]
    assert len(published) == 3
    assert 1e-3 < max(published) < ROUNDING
    scores = await asyncio.to_thread(rescore, run_dir, run_dir / "model")
    assert scores["num_tokens"] > 0
    assert 1e-4 < scores["max_difference"] < ROUNDING
    # What a deleted policy sampled is not checked, which is neither good nor bad.
    for path in (run_dir / "policies").glob("main-*"):
        shutil.rmtree(path)
    scores = await asyncio.to_thread(rescore, run_dir, run_dir / "model")
    assert scores["max_difference"] is None
    assert scores["num_unchecked_rows"]["policy_gone"] > 0
