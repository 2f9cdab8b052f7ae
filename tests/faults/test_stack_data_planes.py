"""Whole jobs whose policies go over gRPC, or through memory, also when a process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, assert_accounted, lines_of, wait_for, write_config

MEMORY = Path("/dev/shm")

pytestmark = [
    pytest.mark.heavy(reason="each is a whole job with a process killed, about a minute"),
    pytest.mark.redis,
    pytest.mark.timeout(420),
]


def in_memory() -> set[Path]:
    return set(MEMORY.glob(f"dialoop-{os.getuid()}-*/latest.json"))


@pytest.mark.parametrize("plane", ["chunks", "shared_memory"])
def test_a_replica_that_dies_comes_back_with_the_newest_policy(plane: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, num_train_steps=12)
    text = config.read_text().replace("[inference]", f'[inference]\ndata_plane = "{plane}"')
    config.write_text(text)
    before = in_memory()
    with Job(tmp_path, "train", str(config)) as job:
        metrics = job.run_dir / "metrics.jsonl"
        wait_for(
            lambda: (
                metrics.exists()
                and sum('"kind": "train"' in line for line in lines_of(metrics)) >= 3
            ),
            240.0,
        )
        assert bool(in_memory() - before) == (plane == "shared_memory")
        pid = job.service("inference")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended = job.end(360.0)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}
    assert ended.summary["num_restarts"]["inference"] == 1
    assert ended.summary["num_train_steps"] == 12
    assert all(ended.summary["gates"].values()), ended.summary["gates"]
    assert_accounted(ended.summary)
    assert in_memory() <= before
