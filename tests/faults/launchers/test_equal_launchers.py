"""One job file ends with the same weights here, on Ray and on Slurm."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters.ray_cluster import ray_cluster
from tests.support.clusters.slurm_cluster import missing_programs, slurm_cluster
from tests.support.stack_jobs import ROOT

# One group at a time, one row at a time and one thread, so that random numbers are drawn in the
# order of tasks, and sums are in one order. The warm start is longer than a replica takes to start.
CONFIG = """
run = "equal"
engine = "transformers"
console = false
[inference]
max_num_seqs = 1
num_threads = 1
[collector]
max_groups_in_flight = 1
max_new_tokens = 24
[warm_start]
num_steps = 260
batch_size = 32
[train]
num_steps = 3
num_threads = 1
groups_per_train_step = 4
pipeline_depth = 0
keep_policies = 0
[evaluation]
num_tasks = 0
[gates]
rescoring_s = 0
"""


def weights_of(folder: Path) -> dict[str, str]:
    """The checksum of every policy that was published."""
    policies = folder / "runs" / "equal" / "policies"
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(policies.glob("*/model.safetensors"))
    }


def run(python: str, folder: Path, *words: str, **variables: str) -> str:
    (folder / "job.toml").write_text(CONFIG)
    environment = {name: v for name, v in os.environ.items() if not name.startswith("DIALOOP_")}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "services", ROOT / "client")))}
    ended = subprocess.run(
        (python, "-m", "dialoop_ops.stack", "train", "job.toml", *words),
        cwd=folder,
        env=environment | paths | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return ended.stdout


@pytest.mark.heavy(reason="the same job here, on a real Ray and on a real Slurm")
@pytest.mark.timeout(2400)
@pytest.mark.redis
@pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm lacks {missing_programs()}")
def test_a_job_ends_with_the_same_weights_on_every_launcher(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("local", "ray", "slurm", "clusters")}
    for folder in folders.values():
        folder.mkdir()
    run(sys.executable, folders["local"])
    with ray_cluster(folders["clusters"], 2) as ray:
        run(ray.python, folders["ray"], "--on", "ray", "--set", f"launch.ray.address={ray.address}")
    with slurm_cluster(folders["clusters"] / "slurm") as slurm:
        output = run(sys.executable, folders["slurm"], "--on", "slurm", **slurm.environment)
        state = slurm.wait_for_job(output.split()[2].rstrip("."), "COMPLETED", "FAILED")
        log = (folders["slurm"] / "runs" / ".equal.slurm.log").read_text("utf-8")
        assert state == "COMPLETED", log[-3000:]
    weights = {name: weights_of(folders[name]) for name in ("local", "ray", "slurm")}
    assert len(weights["local"]) == 4, "the warm start and three train steps"
    assert weights["ray"] == weights["local"]
    assert weights["slurm"] == weights["local"]
    (tmp_path / "weights.json").write_text(json.dumps(weights))
