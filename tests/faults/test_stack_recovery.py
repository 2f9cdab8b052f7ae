"""A service is killed in the middle of a job: the job goes on, and every count still closes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config


def num_train_rows(job: Job) -> int:
    path = job.run_dir / "metrics.jsonl"
    return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0


@pytest.mark.heavy(reason="each kills one process of a whole job, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "service", ["replay", "collector", "environment", "scorer", "trainer", "inference"]
)
def test_a_job_survives_the_death_of(service: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, num_train_steps=12)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 3, 240.0)
        pid = job.service(service)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended = job.end(360.0)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}
    assert ended.summary["num_restarts"][service] == 1
    assert ended.summary["num_train_steps"] == 12
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="hangs one process of a whole job, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(900)
@pytest.mark.parametrize("service", ["inference", "environment"])
def test_a_job_survives_the_hang_of(service: str, tmp_path: Path) -> None:
    """A stopped process answers nothing and does not end; nobody continues it."""
    config = write_config(tmp_path, num_train_steps=12)
    config.write_text("hang_timeout_s = 5\n" + config.read_text())
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 3, 480.0)
        pid = job.service(service)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ended = job.end(360.0)
    assert ended.exit_code == 0, ended.output
    assert "did not answer for 5 s and was killed" in ended.output
    assert job.left_running() == {}
    assert ended.summary["num_restarts"][service] == 1
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="stops the trainer of a whole job, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(420)
def test_a_trainer_that_is_told_to_stop_loses_no_step(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_train_steps=12)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 3, 240.0)
        pid = job.service("trainer")
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        ended = job.end(360.0)
    assert ended.exit_code == 0, ended.output
    assert_accounted(ended.summary)
    assert ended.summary["num_redelivered"] == 0
    rows = [json.loads(line) for line in lines_of(job.run_dir / "metrics.jsonl")]
    assert [row["kind"] for row in rows].count("restore") == 1
    steps = [row["train_step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, 13))


@pytest.mark.heavy(reason="runs a job twice, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(420)
def test_a_killed_stack_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_train_steps=10)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 5, 240.0)
        job.process.kill()
        job.process.wait()
        wait_for(lambda: not job.left_running(), 40.0)
    with Job(tmp_path, "train", str(config)) as again:
        ended = again.end(360.0)
    assert ended.exit_code == 0, ended.output
    assert "resuming" in ended.output
    steps = [json.loads(line) for line in lines_of(job.run_dir / "metrics.jsonl")]
    assert max(row["train_step"] for row in steps if row["kind"] == "train") == 10
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="starts vLLM to kill it, about a minute")
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_killed_stack_takes_vllm_and_its_engine_core_along(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")
    config = write_config(tmp_path, engine="vllm", num_warm_start_steps=100_000)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: "all services are ready" in job.output, 180.0)
        assert len(job.left_running()) > 8  # its engine core is a process of its own
        job.process.kill()
        job.process.wait()
        wait_for(lambda: not job.left_running(), 40.0)
