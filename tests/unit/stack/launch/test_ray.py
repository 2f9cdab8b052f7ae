"""What is asked of Ray, and what is said where there is none."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidConfig, Unavailable
from dialoop_ops.cli.main import main
from dialoop_ops.launch import ray as ray_module
from dialoop_ops.launch.commands import has_moved
from dialoop_ops.launch.ray import (
    MovedError,
    RayNodes,
    RayNodesProcess,
    RayStarter,
    _reserve,
    bundles_of,
    needs_this_machine,
    ray_site,
    require_a_raylet_each,
)
from dialoop_ops.launch.ray_worker import RayWorker
from dialoop_ops.launch.site import ClusterNode
from dialoop_ops.stack.processes.child import StartOrder, stop
from dialoop_services.config.file import parse_config

CONFIG: dict[str, Any] = {
    "train": {"device": "cuda", "num_processes": 4},
    "inference": {"num_replicas": 2, "tensor_parallel_size": 2},
    "resources": {
        "gpus_per_node": 8,
        "trainer": {"processors": 16},
        "inference": {"processors": 8, "memory_gib": 2},
    },
    "launch": {"on": "ray"},
}


def test_the_head_and_each_replica_get_a_bundle_of_what_they_need() -> None:
    assert bundles_of(parse_config(CONFIG, source="job.toml")) == [
        {"CPU": 16, "GPU": 4},
        {"CPU": 8, "GPU": 2, "memory": 2 << 30},
        {"CPU": 8, "GPU": 2, "memory": 2 << 30},
    ]


def test_further_nodes_of_the_trainer_have_bundles_of_their_own() -> None:
    train = {**CONFIG["train"], "num_nodes": 2}
    bundles = bundles_of(parse_config({**CONFIG, "train": train}, source="job.toml"))
    assert bundles[:2] == [{"CPU": 16, "GPU": 4}] * 2
    assert len(bundles) == 4


class Rays:
    """Stands for Ray, which has room for so many groups."""

    def __init__(self, num_groups: int = 2) -> None:
        self.asked: list[tuple[str, int]] = []
        self.util, self._num_groups = self, num_groups

    def get_node_ip_address(self) -> str:
        return "10.0.0.1"

    def placement_group(self, bundles: list[dict[str, float]], *, strategy: str) -> Any:
        self.asked.append((strategy, len(bundles)))
        has_room = len(self.asked) <= self._num_groups
        return SimpleNamespace(wait=lambda limit_s: has_room, number=len(self.asked))


def test_each_node_of_a_trainer_has_a_raylet_of_its_own_and_replicas_lie_where_there_is_room() -> (
    None
):
    two_nodes = CONFIG | {"train": {**CONFIG["train"], "num_nodes": 2}}
    config = parse_config(two_nodes, source="job.toml")
    rays = Rays()
    places = _reserve(rays, config)
    assert rays.asked == [("STRICT_SPREAD", 2), ("PACK", 2)]
    assert {name: (group.number, index) for name, (group, index) in places.items()} == {
        "trainer": (1, 0),
        "trainer-1": (1, 1),
        "inference": (2, 0),
        "inference-1": (2, 1),
    }
    with pytest.raises(Unavailable, match="trainer, trainer-1, each on a raylet of its own") as no:
        _reserve(Rays(0), config)
    assert no.value.reason == "NO_RAY"
    large, small = (ClusterNode(processors=64, memory_gib=99, gpus=gpus) for gpus in (8, 2))
    require_a_raylet_each(config, [large, large])
    with pytest.raises(
        InvalidConfig, match=r"1 of the cluster's 2 .* none for trainer-1"
    ) as caught:
        require_a_raylet_each(config, [large, small])
    assert caught.value.reason == "PLAN_TOO_LARGE"
    alone = Rays()
    _reserve(alone, parse_config(CONFIG, source="job.toml"))
    assert alone.asked == [("PACK", 3)]


class OneNode:
    """A process on a node of Ray that ends with a code, or runs on until it is killed."""

    def __init__(self, code: int | None) -> None:
        self.code, self.pid, self.was_told = code, 7, False
        self.has_ended = asyncio.Event()
        if code is not None:
            self.has_ended.set()

    async def wait(self) -> int:
        await self.has_ended.wait()
        assert self.code is not None
        return self.code

    def terminate(self) -> None:
        self.was_told = True
        self.code = 0
        self.has_ended.set()

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code
        self.has_ended.set()


@pytest.mark.parametrize(
    ("codes", "expected"), [((1, None), 1), ((None, -9), -9), ((2, 1), 2), ((0, 0), 0)]
)
async def test_nodes_of_one_process_end_together(
    codes: tuple[int | None, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_module, "_LAST_WORDS_S", 0.05)
    nodes = [OneNode(code) for code in codes]
    process = RayNodesProcess(nodes)  # type: ignore[arg-type]
    assert await process.wait() == process.exit_code == expected
    assert all(node.has_ended.is_set() for node in nodes)


async def test_a_stop_tells_all_nodes() -> None:
    nodes = [OneNode(None), OneNode(None)]
    process = RayNodesProcess(nodes)  # type: ignore[arg-type]
    assert process.exit_code is None
    assert await stop(process, 5) == 0
    assert [node.was_told for node in nodes] == [True, True]


async def test_each_node_gets_its_number() -> None:
    class Starter(RayStarter):
        def __init__(self) -> None:
            self.commands: list[tuple[str, ...]] = []

        async def start(self, order: StartOrder) -> Any:  # type: ignore[override]
            self.commands.append(order.command)
            return OneNode(0)

    starters = [Starter(), Starter()]
    order = StartOrder(
        command=("launch", "4"),
        environment={},
        log=Path("log"),
        guardian=None,  # type: ignore[arg-type]
    )
    await (await RayNodes(starters).start(order)).wait()
    assert [each.commands for each in starters] == [
        [("launch", "4", "--node", "0")],
        [("launch", "4", "--node", "1")],
    ]


def test_the_head_stays_where_its_folder_or_its_redis_is_for_this_machine() -> None:
    def stays(url: str = "", **values: Any) -> bool:
        config = parse_config({"engine": "transformers"} | values, source="job.toml")
        return needs_this_machine(config, {"REDIS_URL": url})

    assert stays()
    assert not stays("redis://redis.store:6379/0")
    assert not stays(store="memory")
    assert stays("redis://redis.store:6379/0", launch={"shared_folder": False})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_nothing_starts_and_the_remedy_is_said() -> None:
    with (
        pytest.raises(Unavailable, match="Ray is not installed") as caught,
        ray_site(parse_config(CONFIG, source="job.toml")),
    ):
        pass
    assert caught.value.reason == "NO_RAY"
    assert 'pip install "dialoop-ops[ray]"' in caught.value.remedy


def test_a_process_that_moved_is_told_from_other_failures() -> None:
    moved = MovedError("inference", "10.0.0.1", "10.0.0.2")
    assert has_moved(ExceptionGroup("", [ExceptionGroup("", [moved])]))
    assert not has_moved(ExceptionGroup("", [Unavailable("Other.")]))


def test_print_shows_bundles_and_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('engine = "transformers"\nstore = "memory"\n')
    assert main(["train", "job.toml", "--on", "ray", "--print"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('# Bundle: {"CPU": 0.01}\n# Bundle: {"CPU": 0.01}\n')
    assert "DIALOOP_INFERENCE_HOST=0.0.0.0" in printed
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand for Ray where the worker asks for its devices."""
    module, gpus = ModuleType("ray"), [3, 5]
    module.cluster_resources = lambda: {"GPU": 8.0}  # type: ignore[attr-defined]
    module.get_gpu_ids = lambda: gpus  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    return gpus


def wait_for_end(worker: RayWorker) -> tuple[int, bytes]:
    output, deadline = b"", time.monotonic() + 30
    while True:
        code, new = worker.poll()
        output += new
        if code is not None:
            return code, output
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_runs_a_process_with_its_devices_and_passes_output_and_exit_code_on(
    devices: list[int], tmp_path: Path
) -> None:
    worker = RayWorker()
    program = (
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd()); raise SystemExit(3)"
    )
    worker.start([sys.executable, "-c", program], {}, str(tmp_path), [])
    assert wait_for_end(worker) == (3, f"3,5 {tmp_path}\n".encode())
    assert worker.poll() == (3, b"")


def test_a_worker_ends_a_process_with_all_that_it_started(devices: list[int]) -> None:
    worker = RayWorker()
    pid = worker.start(["sh", "-c", "sleep 60 & echo $!; wait"], {}, None, [])
    output = b""
    while not output:
        output = worker.poll()[1]
    worker.send(signal.SIGKILL)
    assert wait_for_end(worker)[0] == -signal.SIGKILL
    time.sleep(0.2)
    for number in (pid, int(output)):
        state = Path(f"/proc/{number}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_worker_waits_until_what_was_there_before_has_left_its_port(devices: list[int]) -> None:
    holder = socket.socket()
    holder.bind(("", 0))
    holder.listen()
    threading.Timer(0.6, holder.close).start()
    worker, started = RayWorker(), time.monotonic()
    worker.start([sys.executable, "-c", ""], dict(os.environ), None, [holder.getsockname()[1]])
    assert time.monotonic() - started > 0.5
    assert wait_for_end(worker)[0] == 0
