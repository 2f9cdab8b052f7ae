"""Jobs on a real Slurm of two nodes: one loses a node, one reaches its time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster
from tests.support.stack_jobs import ROOT

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm lacks {missing_programs()}"),
    pytest.mark.timeout(1500),
]
DEMO = ROOT / "infra" / "configs" / "demo.toml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    """Submit the demo's job with the transformers engine and return its number."""
    variables = {n: v for n, v in cluster.environment.items() if not n.startswith("DIALOOP_")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "services", ROOT / "client")))
    command = (sys.executable, "-m", "dialoop_ops.stack", "train", str(DEMO), "--on", "slurm")
    settings = ("engine=transformers", "console=false", *words)
    answer = subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()[2].rstrip(".")


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs" / "demo" / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_step(cluster: SlurmCluster, job: str, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 600
    while not any(row["train_step"] >= step for row in rows(folder) if row["kind"] == "train"):
        assert cluster.state_of(job) in ("PENDING", "RUNNING"), log_of(folder)[-2000:]
        assert time.monotonic() < deadline, log_of(folder)[-2000:]
        time.sleep(0.5)


def log_of(folder: Path) -> str:
    path = folder / "runs" / ".demo.slurm.log"
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


@pytest.mark.heavy(reason="the demo's whole job on a real Slurm, once with a node that dies")
def test_the_demo_learns_on_slurm_although_a_node_dies(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        tmp_path,
        "train.checkpoint_every=2",
        "gates.policy_versions_at_least=1",
        "gates.older_data_share_at_least=0",
    )
    wait_for_step(cluster, job, tmp_path, 4)
    steps = cluster.ask("squeue", "--steps", "-h", "--format=%j %N").splitlines()
    assert "inference n2" in steps, "the replica is a step on the second node"
    cluster.kill_node("n2")
    cluster.wait_for_job(job, "PENDING", "COMPLETING", timeout_s=60)
    cluster.start_node("n2")
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log_of(
        tmp_path
    )[-3000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert all(summary["gates"].values()), summary["gates"]
    assert "resuming" in log_of(tmp_path), "it went on from its checkpoint"


@pytest.mark.heavy(reason="a job on a real Slurm that reaches its time limit, which has minutes")
def test_a_job_saves_before_its_time_limit_and_goes_on_later(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        tmp_path,
        "launch.slurm.time_limit_min=3",
        "launch.slurm.save_before_s=75",
        "train.num_steps=100000",
        "train.checkpoint_every=100000",
        "warm_start.checkpoint_every=100000",
        "evaluation.num_tasks=16",
        "evaluation.every=0",
    )
    deadline = time.monotonic() + 400
    while log_of(tmp_path).count("run demo") < 2:
        assert time.monotonic() < deadline, log_of(tmp_path)[-2000:]
        time.sleep(1)
    cluster.ask("scancel", job)
    text = log_of(tmp_path)
    assert "Stopped. Saved in" in text
    assert "resuming" in text
