"""Services die or hang in the middle of a job: the job goes on, and every count still closes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config

NUM_STEPS = 40
SERVICES = ("replay", "collector", "environment", "scorer", "trainer", "inference")
# A guard against hanging: a restart may take long on a loaded machine.
PATIENCE_S = 400.0


def num_train_rows(job: Job) -> int:
    path = job.run_dir / "metrics.jsonl"
    return sum('"kind": "train"' in line for line in lines_of(path)) if path.exists() else 0


def write_long_config(folder: Path, first_line: str = "") -> Path:
    """A job of many small train steps: a quick one ends before the last service has died."""
    config = write_config(folder, num_warm_start_steps=110, num_train_steps=NUM_STEPS)
    text = config.read_text().replace("groups_per_train_step = 4", "groups_per_train_step = 2")
    config.write_text(f"{first_line}\n{text}")
    return config


def signal_one_after_the_other(job: Job, number: signal.Signals) -> None:
    """Send every service a signal that ends it, each when the job trains and nothing is down."""
    for service in SERVICES:
        steps = num_train_rows(job)
        wait_for(lambda steps=steps: num_train_rows(job) >= steps + 2, PATIENCE_S)
        pid = job.service(service)
        assert pid is not None
        num_ready = job.num_ready(service)
        os.kill(pid, number)
        wait_for(lambda s=service, n=num_ready: job.num_ready(s) > n, PATIENCE_S)


@pytest.mark.heavy(reason="kills every process of a job once, some minutes")
@pytest.mark.redis
@pytest.mark.timeout(1800)
def test_a_job_survives_the_death_of_each_service(tmp_path: Path) -> None:
    config = write_long_config(tmp_path)
    with Job(tmp_path, "train", str(config)) as job:
        signal_one_after_the_other(job, signal.SIGKILL)
        ended = job.end(PATIENCE_S)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}
    restarts = ended.summary["num_restarts"]
    assert {service: restarts[service] for service in SERVICES} == dict.fromkeys(SERVICES, 1)
    assert ended.summary["num_train_steps"] == NUM_STEPS
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="hangs every process of a job once, some minutes")
@pytest.mark.redis
@pytest.mark.timeout(1800)
def test_a_job_survives_the_hang_of_each_service(tmp_path: Path) -> None:
    """A stopped process answers nothing and does not end; nobody continues it."""
    config = write_long_config(tmp_path, "hang_timeout_s = 10")
    with Job(tmp_path, "train", str(config)) as job:
        signal_one_after_the_other(job, signal.SIGSTOP)
        ended = job.end(PATIENCE_S)
    assert ended.exit_code == 0, ended.output
    for service in SERVICES:
        assert f"{service:11} did not answer for 10 s and was killed" in ended.output
    assert job.left_running() == {}
    assert ended.summary["num_train_steps"] == NUM_STEPS
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="stops the trainer of a whole job, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(1200)
def test_a_trainer_that_is_told_to_stop_loses_no_step(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_warm_start_steps=110, num_train_steps=12)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 3, PATIENCE_S)
        pid = job.service("trainer")
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        ended = job.end(PATIENCE_S)
    assert ended.exit_code == 0, ended.output
    assert_accounted(ended.summary)
    log = (job.run_dir / "logs" / "trainer.log").read_text("utf-8")
    (given_back,) = re.findall(r"Stopped between two train steps\..*num_returned=(\d+)", log)
    assert ended.summary["num_redelivered"] == int(given_back)
    rows = [json.loads(line) for line in lines_of(job.run_dir / "metrics.jsonl")]
    assert [row["kind"] for row in rows].count("restore") == 1
    steps = [row["train_step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, 13))


@pytest.mark.heavy(reason="runs a job twice, about a minute")
@pytest.mark.redis
@pytest.mark.timeout(1200)
def test_a_killed_stack_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_warm_start_steps=110, num_train_steps=10)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: num_train_rows(job) >= 5, PATIENCE_S)
        job.process.kill()
        job.process.wait()
        wait_for(lambda: not job.left_running(), PATIENCE_S)
    with Job(tmp_path, "train", str(config)) as again:
        ended = again.end(PATIENCE_S)
    assert ended.exit_code == 0, ended.output
    assert "resuming" in ended.output
    steps = [json.loads(line) for line in lines_of(job.run_dir / "metrics.jsonl")]
    assert max(row["train_step"] for row in steps if row["kind"] == "train") == 10
    assert_accounted(ended.summary)


@pytest.mark.heavy(reason="starts vLLM to kill it, about a minute")
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_a_killed_stack_takes_vllm_and_its_engine_core_along(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")
    config = write_config(tmp_path, engine="vllm", num_warm_start_steps=100_000)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: "all services are ready" in job.output, PATIENCE_S)
        assert any("EngineCor" in command for command in job.left_running().values())
        job.process.kill()
        job.process.wait()
        wait_for(lambda: not job.left_running(), PATIENCE_S)
