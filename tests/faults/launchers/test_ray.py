"""Jobs on a real Ray of four raylets: one of them is killed; every process sees its devices."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dialoop.errors import InvalidConfig
from dialoop_ops.cli.scale import scale

from tests.support.clusters.ray_cluster import RayCluster, ray_cluster
from tests.support.stack_jobs import ROOT

pytestmark = [pytest.mark.redis, pytest.mark.timeout(1500)]
DEMO = ROOT / "infra" / "configs" / "demo.toml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), 4) as running:
        yield running


def start(cluster: RayCluster, folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start the demo's job with the transformers engine; what it writes goes to out.txt."""
    variables = {name: v for name, v in os.environ.items() if not name.startswith("DIALOOP_")}
    command = (cluster.python, "-m", "dialoop_ops.stack", "train", str(DEMO), "--on", "ray")
    all_settings = (
        "engine=transformers",
        "console=false",
        f"launch.ray.address={cluster.address}",
        *settings,
    )
    with (folder / "out.txt").open("ab") as output:
        return subprocess.Popen(
            [*command, *(word for setting in all_settings for word in ("--set", setting))],
            cwd=folder,
            env=variables,
            stdout=output,
            stderr=output,
            text=True,
        )


def output_of(folder: Path) -> str:
    return (folder / "out.txt").read_text("utf-8", errors="replace")


def text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.exists() else ""


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs" / "demo" / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def processes_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What the stack says of its processes, once all are ready."""
    path = folder / "runs" / "demo" / "stack.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    return dict(content["processes"]) if content.get("addresses") else {}


def wait_for(job: subprocess.Popen[str], folder: Path, what: Any) -> None:
    deadline = time.monotonic() + 600
    while not what():
        assert job.poll() is None, output_of(folder)[-3000:]
        assert time.monotonic() < deadline, output_of(folder)[-3000:]
        time.sleep(0.5)


def trains_at(folder: Path, step: int) -> bool:
    return any(row["kind"] == "train" and row["train_step"] >= step for row in rows(folder))


def scale_to(folder: Path, *counts: str) -> int:
    """What `dialoop scale` does; it returns once the processes are ready or have ended."""
    words = {"root": folder / "runs", "run": "demo", "counts": [*counts], "timeout": 240.0}
    return scale(argparse.Namespace(json=False, **words))


@pytest.mark.heavy(reason="the demo's whole job on a real Ray, on which it grows and shrinks")
def test_collectors_and_replicas_grow_and_shrink_while_a_job_runs_on_ray(
    cluster: RayCluster, tmp_path: Path
) -> None:
    sizes = ("resources.inference.processors=1", "resources.inference.memory_gib=3")
    job = start(
        cluster, tmp_path, *sizes, "discovery=registry", "launch.ray.place_within_s=10", "seed=0"
    )
    logs = tmp_path / "runs" / "demo" / "logs"
    wait_for(job, tmp_path, lambda: trains_at(tmp_path, 1))
    assert cluster.num_groups() == 1
    assert scale_to(tmp_path, "collector=2", "inference=2") == 0
    assert cluster.num_groups() == 3
    actors = cluster.nodes_of_actors()
    added = {name: processes_of(tmp_path)[name]["pid"] for name in ("collector-1", "inference-1")}
    assert all(psutil.Process(pid).ppid() in actors for pid in added.values())
    with pytest.raises(InvalidConfig, match="Ray had no room within 10 s"):
        scale_to(tmp_path, "inference=4")  # three nodes have the memory of one replica each
    wait_for(job, tmp_path, lambda: "first request is answered" in text(logs / "inference-1.log"))
    assert re.search(r"A replica is in rotation.*replica=inference-1 ", text(logs / "trainer.log"))
    os.kill(added["inference-1"], signal.SIGKILL)
    wait_for(job, tmp_path, lambda: processes_of(tmp_path)["inference-1"]["num_restarts"] == 1)
    assert scale_to(tmp_path, "collector=1", "inference=1") == 0
    wait_for(job, tmp_path, lambda: cluster.num_groups() == 1)
    assert not any(psutil.pid_exists(pid) for pid in added.values())
    assert job.wait(1200) == 0, output_of(tmp_path)[-3000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert all(summary["gates"].values()), summary["gates"]


@pytest.mark.heavy(reason="the demo's whole job on a real Ray whose replica loses its raylet")
def test_the_demo_learns_on_ray_although_a_raylet_is_killed(
    cluster: RayCluster, tmp_path: Path
) -> None:
    # The replica fits neither beside the head nor on the first raylet, which has to live on. Of the
    # other three one may have the head, one is killed, and one has room.
    trainer, replica = "resources.trainer.processors=3", "resources.inference.processors=2"
    sizes = (trainer, replica, "resources.inference.memory_gib=2")
    job = start(cluster, tmp_path, *sizes, "train.checkpoint_every=2", "seed=0")
    wait_for(job, tmp_path, lambda: trains_at(tmp_path, 3))
    processes = processes_of(tmp_path)
    nodes = cluster.nodes_of_actors()
    parents = {n: psutil.Process(p["pid"]).ppid() for n, p in processes.items() if n != "redis"}
    home = {name: nodes[parent] for name, parent in parents.items()}
    head = {node for name, node in home.items() if name != "inference"}
    assert len(head) == 1, "the head is on one node"
    assert home["inference"] not in head
    assert home["inference"] != cluster.nodes[0], "the raylet to kill is not that of the driver"
    cluster.kill_node(home["inference"])
    killed = time.monotonic()
    wait_for(job, tmp_path, lambda: processes_of(tmp_path)["inference"]["num_restarts"] > 0)
    assert time.monotonic() - killed < 120
    assert job.wait(1200) == 0, output_of(tmp_path)[-3000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert all(summary["gates"].values()), summary["gates"]


@pytest.mark.heavy(reason="a real Ray")
def test_under_ray_every_process_sees_exactly_its_devices(
    cluster: RayCluster, tmp_path: Path
) -> None:
    devices = ("resources.scorer.devices=1", "resources.environment.devices=1")
    job = start(cluster, tmp_path, "resources.gpus_per_node=2", *devices, "run=demo")
    try:
        wait_for(job, tmp_path, lambda: processes_of(tmp_path))
        visible = {
            name: psutil.Process(each["pid"]).environ().get("CUDA_VISIBLE_DEVICES")
            for name, each in processes_of(tmp_path).items()
        }
    finally:
        job.terminate()
        job.wait(120)
    del visible["redis"]  # it writes its title over its variables
    assert {visible.pop("scorer"), visible.pop("environment")} == {"0", "1"}
    assert set(visible.values()) == {""}


@pytest.mark.heavy(reason="a real Ray")
def test_a_job_larger_than_the_cluster_is_refused_before_anything_starts(
    cluster: RayCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path, "resources.inference.processors=5")
    assert job.wait(120) == 2
    assert "inference 5 = 5 of" in output_of(tmp_path)
    assert "4 at most on one node" in output_of(tmp_path)
