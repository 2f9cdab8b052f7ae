"""A trainer of two nodes on a real Slurm and a real Ray: one process's weights; a node dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from dialoop.trajectory import Group
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.launch.plan import Needs
from dialoop_ops.launch.slurm import SlurmStep
from dialoop_services.replay.store import QueueLimits
from safetensors.torch import load_file

from tests.faults.launchers.test_slurm import log_of, submit, wait_for_step
from tests.support.clusters.ray_cluster import ray_cluster
from tests.support.clusters.slurm_cluster import missing_programs, slurm_cluster
from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import ROOT, Recorded, record_groups, recorded_world
from tests.support.stack_jobs import assert_accounted, write_config

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm lacks {missing_programs()}"),
]
NUM_STEPS = 10
SETTINGS = {
    "num_steps": NUM_STEPS,
    "pipeline_depth": 0,
    "learning_rate": 3e-4,
    "checkpoint_every": 5,
    "exit_when_done": True,
    "debug_table_every": 1,
}
RAY_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
import ray
from dialoop_ops.launch.plan import Needs
from dialoop_ops.launch.ray import RayNodes, RayStarter
from dialoop_ops.stack.processes.child import StartOrder
address, log, command, environment = json.load(sys.stdin)
ray.init(address=address, log_to_driver=False, configure_logging=False)
group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert group.wait(60)
needs = Needs(processors=1)
starters = [RayStarter(ray, "trainer", needs, group, bundle=node) for node in (0, 1)]
order = StartOrder(
    command=tuple(command), environment=environment, log=Path(log), guardian=None
)
async def run():
    return await (await RayNodes(starters).start(order)).wait()
sys.exit(asyncio.run(run()))
"""


def launch_of(num_nodes: int, num_processes: int) -> tuple[str, ...]:
    """The plan's command; the nodes of this machine meet at a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    module = "dialoop_services.trainer.learner.launch"
    words = (str(num_processes), "--num-nodes", str(num_nodes), "--rendezvous", meeting)
    return (sys.executable, "-m", module, *words)


def variables_of(world: Recorded) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "services")))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | world.environment(**SETTINGS)


class Ended:
    """What a trainer left."""

    def __init__(self, world: Recorded) -> None:
        newest = json.loads((world.run_dir / "policies" / "latest.json").read_text())
        path = world.run_dir / "policies" / newest["path"]
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.weights: dict[str, torch.Tensor] = load_file(path)
        rows = [row for row in world.train_rows if row["num_trained_tokens"]]
        self.loss = torch.tensor([row["loss"] for row in rows], dtype=torch.float64)
        self.norm = torch.tensor([row["grad_norm"] for row in rows], dtype=torch.float64)
        table = (world.run_dir / "debug_table.jsonl").read_text("utf-8").splitlines()
        self.logprobs = {
            (row["train_step"], row["trajectory_id"]): torch.tensor(row["policy_logprobs"])
            for row in map(json.loads, table)
        }


async def train(
    folder: Path, model_dir: Path, groups: list[Group], run: object, variables: dict[str, str]
) -> Ended:
    """Train on recorded groups by a command that gets the world's variables."""
    assert callable(run)
    async with recorded_world(folder, model_dir, ModelStore(QueueLimits()), groups) as world:
        command, text = run(world)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")}
        ended = await asyncio.to_thread(
            subprocess.run,
            command,
            input=text,
            env=inherited | variables | variables_of(world),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        log = world.run_dir / "trainer.log"
        said = ended.stdout + ended.stderr + (log.read_text() if log.is_file() else "")
        assert ended.returncode == 0, said[-4000:]
        return Ended(world)


@pytest.mark.heavy(reason="ten steps of four ranks on a real Slurm and on a real Ray")
async def test_two_nodes_of_two_ranks_end_with_one_processs_weights_on_slurm_and_ray(
    tmp_path: Path,
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=0)
    groups = record_groups(model_dir, 3 * NUM_STEPS)

    def alone(world: Recorded) -> tuple[tuple[str, ...], None]:
        return (sys.executable, "-m", "dialoop_services.trainer"), None

    def by_slurm(world: Recorded) -> tuple[tuple[str, ...], None]:
        step = SlurmStep(name="trainer", group=0, needs=Needs(), job="", num_nodes=2)
        command = step.command(launch_of(2, 2), ROOT)
        return tuple(word for word in command if not word.startswith("--het-group")), None

    one = await train(tmp_path / "one", model_dir, groups, alone, {})
    with slurm_cluster(tmp_path / "slurm") as slurm:
        of_slurm = await train(
            tmp_path / "by_slurm", model_dir, groups, by_slurm, slurm.environment
        )
    with ray_cluster(tmp_path, 2) as ray:

        def by_ray(world: Recorded) -> tuple[tuple[str, ...], str]:
            log = str(world.run_dir / "trainer.log")
            order = (ray.address, log, launch_of(2, 2), variables_of(world))
            return (ray.python, "-c", RAY_PROGRAM), json.dumps(order)

        of_ray = await train(tmp_path / "by_ray", model_dir, groups, by_ray, {})
    assert len(one.loss) == NUM_STEPS
    assert of_slurm.digest == of_ray.digest
    assert {step for step, _ in one.logprobs} == set(range(1, NUM_STEPS + 1))
    torch.testing.assert_close(of_slurm.logprobs, one.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_slurm.loss, one.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_slurm.norm, one.norm, rtol=1e-5, atol=1e-5)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(of_slurm.weights[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.heavy(reason="a job on a real Ray whose trainer loses a raylet")
def test_a_job_on_ray_goes_on_after_a_raylet_of_its_trainer_has_died(tmp_path: Path) -> None:
    config = write_config(tmp_path, store="memory", num_warm_start_steps=60, num_train_steps=10)
    settings = (
        "train.num_nodes=2",
        "launch.on=ray",
        # Each of the trainer's nodes takes most of a raylet, and the last one is for later. The
        # driver's, which has to live on, has too little memory.
        "resources.trainer.processors=3",
        "resources.trainer.memory_gib=2",
        "train.num_threads=1",
    )
    with ray_cluster(tmp_path, 4) as cluster, ExitStack() as exits:
        words = (*settings, f"launch.ray.address={cluster.address}")
        with (tmp_path / "out.txt").open("wb") as output:
            job = subprocess.Popen(
                [cluster.python, "-m", "dialoop_ops.stack", "train", str(config)]
                + [word for setting in words for word in ("--set", setting)],
                cwd=tmp_path,
                env={n: v for n, v in os.environ.items() if not n.startswith("DIALOOP_")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        exits.callback(job.kill)
        run_dir = tmp_path / "runs" / "job"

        def said() -> str:
            return (tmp_path / "out.txt").read_text("utf-8", errors="replace")[-3000:]

        def train_steps() -> int:
            path = run_dir / "metrics.jsonl"
            return path.read_text("utf-8").count('"kind": "train"') if path.is_file() else 0

        deadline = time.monotonic() + 900
        while train_steps() < 4:
            assert job.poll() is None, said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.5)
        nodes = cluster.nodes_of_actors()
        [second] = [
            process
            for process in psutil.process_iter()
            if process.ppid() in nodes and "--node 1" in " ".join(process.cmdline())
        ]
        cluster.kill_node(nodes[second.ppid()])
        assert job.wait(1200) == 0, said()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_train_steps"] == 10
    log = (run_dir / "logs" / "trainer.log").read_text("utf-8", errors="replace")
    assert "Its node, or Ray's actor of it, is gone" in log, "the second node's"
    assert "Rank 0 of 2 lost its connection" in log
    assert_accounted(summary)


@pytest.mark.heavy(reason="the demo's whole job with a trainer on two nodes, of which one dies")
@pytest.mark.redis
def test_the_demo_goes_on_after_a_node_of_its_trainer_has_died(tmp_path: Path) -> None:
    # Slurm gives no node to two components of a job, and the replica has one of its own.
    with slurm_cluster(tmp_path / "slurm", num_nodes=3) as cluster:
        job = submit(
            cluster,
            tmp_path,
            "train.num_nodes=2",
            "train.checkpoint_every=2",
            "gates.policy_versions_at_least=1",
            "gates.older_data_share_at_least=0",
        )
        wait_for_step(cluster, job, tmp_path, 4)
        nodes = cluster.ask("squeue", "--steps", "-h", "--format=%j %N").splitlines()
        assert "trainer n[1-2]" in nodes
        cluster.kill_node("n2")
        cluster.wait_for_job(job, "PENDING", "COMPLETING", timeout_s=120)
        cluster.start_node("n2")
        state = cluster.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=1500)
        assert state == "COMPLETED", log_of(tmp_path)[-3000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert all(summary["gates"].values()), summary["gates"]
    assert "resuming" in log_of(tmp_path), "it went on from its checkpoint"
    assert_accounted(summary)
