"""A job from Python whose services run in processes of their own, as `dialoop train` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dialoop_ops
import pytest

CONFIG: dict[str, Any] = {
    "run": "tiny",
    "engine": "transformers",
    "store": "memory",
    "inference": {"max_model_len": 128},
    "collector": {"group_size": 2, "max_new_tokens": 8},
    # An untrained model earns the same for all of a group, and that alone is no signal.
    "scorer": {"kl_coefficient": 0.1},
    "warm_start": {"num_steps": 2, "batch_size": 4},
    "train": {"num_steps": 2, "groups_per_train_step": 2, "pipeline_depth": 1},
    "evaluation": {"num_tasks": 2, "every": 0},
}


@pytest.mark.heavy(reason="starts all services and trains, a minute on two cores")
@pytest.mark.timeout(400)
def test_a_job_of_processes_trains_to_its_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    result = dialoop_ops.train(CONFIG, on_metrics=rows.append, folder=tmp_path, quiet=True)
    assert [row["kind"] for row in rows].count("train") == result.summary["num_train_steps"] >= 1
    assert result.succeeded, result.summary["gates"]
