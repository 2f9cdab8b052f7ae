"""A whole job whose trainer is two processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config


def two_processes(config: Path, extra: str = "") -> Path:
    """The config with two trainer processes."""
    text = config.read_text()
    config.write_text(text.replace("[train]\n", f"[train]\nnum_processes = 2\n{extra}"))
    return config


@pytest.mark.heavy(reason="a whole job")
@pytest.mark.timeout(1200)
def test_a_job_trains_on_two_processes_and_outlives_the_kill_of_one(tmp_path: Path) -> None:
    config = two_processes(write_config(tmp_path, store="memory", num_warm_start_steps=60))
    with Job(tmp_path, "train", str(config)) as job:
        metrics = job.run_dir / "metrics.jsonl"
        wait_for(
            lambda: metrics.is_file() and sum('"train"' in x for x in lines_of(metrics)) >= 3,
            timeout_s=400,
        )
        rank = job.service("trainer")
        assert rank is not None
        os.kill(rank, signal.SIGKILL)
        ended = job.end(timeout_s=400)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}
    assert "was ended by signal 9." in ended.output
    summary = ended.summary
    assert summary["num_train_steps"] == 6
    assert summary["max_logprob_difference"] <= 1e-4
    assert_accounted(summary)


@pytest.mark.heavy(reason="starts the stack")
@pytest.mark.timeout(600)
def test_devices_that_are_not_there_end_the_job_before_it_starts(tmp_path: Path) -> None:
    config = two_processes(write_config(tmp_path, store="memory"), 'device = "cuda"\n')
    with Job(tmp_path, "train", str(config), CUDA_VISIBLE_DEVICES="") as job:
        ended = job.end(timeout_s=400)
    assert ended.exit_code == 2, ended.output
    assert "train.device needs 2 GPUs, and this machine has none." in ended.output
    assert job.left_running() == {}
