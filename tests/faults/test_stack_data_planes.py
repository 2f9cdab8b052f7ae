"""Whole jobs whose policies go over gRPC, or through memory, also when a process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from dialoop_ops.stack.run_dir import RunDir
from dialoop_ops.stack.running import memory_for
from dialoop_services.config.file import parse_config

from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config

pytestmark = [
    pytest.mark.heavy(reason="each is a whole job with a process killed, about a minute"),
    pytest.mark.redis,
    pytest.mark.timeout(1200),
]


def memory_of(job: Job) -> Path:
    """The folder in memory that is this job's alone; other stacks on the machine have theirs."""
    config = parse_config({"inference": {"data_plane": "shared_memory"}}, source="the test")
    folder = memory_for(config, RunDir(path=job.run_dir, run_id=""))
    assert folder is not None
    return folder


@pytest.mark.parametrize("plane", ["chunks", "shared_memory"])
def test_a_replica_that_dies_comes_back_with_the_newest_policy(plane: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, num_warm_start_steps=110, num_train_steps=8)
    text = config.read_text().replace("[inference]", f'[inference]\ndata_plane = "{plane}"')
    config.write_text(text)
    with Job(tmp_path, "train", str(config)) as job:
        metrics = job.run_dir / "metrics.jsonl"
        wait_for(
            lambda: (
                metrics.exists()
                and sum('"kind": "train"' in line for line in lines_of(metrics)) >= 3
            ),
            400.0,
        )
        memory = memory_of(job)
        assert (memory / "latest.json").exists() == (plane == "shared_memory")
        pid = job.service("inference")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended = job.end(400.0)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}
    assert ended.summary["num_restarts"]["inference"] == 1
    assert ended.summary["num_train_steps"] == 8
    assert all(ended.summary["gates"].values()), ended.summary["gates"]
    assert_accounted(ended.summary)
    assert not memory.exists()
