"""The trainer as several processes: the curve of one, and they end together."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.trainer import Phase, TrainerClient
from dialoop.errors import DialoopError
from dialoop.trajectory import Group
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime.exit_reason import CONFIG_ERROR, EXIT_REASON_VARIABLE
from safetensors.torch import load_file

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import ROOT, Recorded, record_groups, recorded_world

pytestmark = [
    pytest.mark.timeout(1200),  # processes start slowly on a busy machine
    pytest.mark.heavy(reason="starts trainers of several processes"),
]

NUM_STEPS = 20
SETTINGS = {"checkpoint_every": 50, "learning_rate": 3e-4}
LORA = {"model": {"lora_rank": 4, "publish": "merged"}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def groups(model_dir: Path) -> list[Group]:
    return record_groups(model_dir, 3 * NUM_STEPS)


class Trainer:
    """`python -m dialoop_services.trainer`, or its launch with `size` processes."""

    def __init__(
        self, world: Recorded, *, size: int, under_torchrun: bool = False, **settings: Any
    ):
        reason = {EXIT_REASON_VARIABLE: str(settings.pop("reason", ""))}
        module = ["dialoop_services.trainer"]
        if under_torchrun:
            module = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
            module += ["dialoop_services.trainer"]
        elif size > 1:
            module = ["dialoop_services.trainer.learner.launch", str(size)]
        self.log = world.run_dir / f"log of {size}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")}
        python_path = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
        paths = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *module],
                env=inherited | paths | reason | world.environment(**{**SETTINGS, **settings}),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it while the trainer lives."""
        async with asyncio.timeout(400):
            while not condition():
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                await asyncio.sleep(0.05)

    async def end(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, 200)

    async def stop(self) -> None:
        """Stop it in order; every rank must have left without a complaint."""
        self.process.send_signal(signal.SIGTERM)
        code, log = await self.end(), self.log.read_text()
        assert code == 0, log[-4000:]
        for complaint in ("Traceback", "terminate called", "not been destroyed", "Error"):
            assert complaint not in log, log[-4000:]

    def ranks(self) -> dict[int, int]:
        """The pid of each rank that runs."""
        pids = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                stat = (directory / "stat").read_text().rpartition(")")[2].split()
                variables = (directory / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(stat[1]) == self.process.pid and stat[0] != "Z":
                rank = next(v for v in variables if v.startswith(b"RANK="))
                pids[int(rank.removeprefix(b"RANK="))] = int(directory.name)
        return pids


async def train(world: Recorded, *, size: int, num_steps: int = NUM_STEPS, **settings: Any) -> None:
    """From where the run stands to its end, and stop."""
    (world.run_dir / "trainer.json").unlink(missing_ok=True)
    trainer = Trainer(world, size=size, num_steps=num_steps, **settings)
    try:
        await trainer.until((world.run_dir / "trainer.json").is_file)
        await trainer.stop()
    finally:
        trainer.process.kill()


async def run_of(
    folder: Path, model_dir: Path, groups: list[Group], *parts: dict[str, Any]
) -> Recorded:
    """A world in which one trainer after the other has trained."""
    async with recorded_world(folder, model_dir, ModelStore(QueueLimits()), groups) as world:
        for part in parts:
            await train(world, **part)
        return world


def curve(world: Recorded, name: str = "loss") -> torch.Tensor:
    """A number of each train step that had something to train."""
    rows = [row for row in world.train_rows if row["num_trained_tokens"]]
    return torch.tensor([row[name] for row in rows], dtype=torch.float64)


def final_weights(world: Recorded) -> dict[str, torch.Tensor]:
    newest = json.loads((world.run_dir / "policies" / "latest.json").read_text())
    weights: dict[str, torch.Tensor] = load_file(world.run_dir / "policies" / newest["path"])
    return weights


def assert_same(expected: Recorded, actual: Recorded, *, num_steps: int = NUM_STEPS) -> None:
    assert [row["train_step"] for row in actual.train_rows] == list(range(1, num_steps + 1))
    torch.testing.assert_close(curve(actual), curve(expected), rtol=0, atol=1e-5)
    norms = curve(actual, "grad_norm"), curve(expected, "grad_norm")
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)
    weights, reference = final_weights(actual), final_weights(expected)
    assert weights.keys() == reference.keys()
    whole = torch.cat([reference[name].flatten() for name in reference])
    off = torch.cat([weights[name].flatten() for name in reference]) - whole
    assert float(off.norm()) < 1e-6 * float(whole.norm())
    # Each of the 829 thousand, but for a few whose gradient is nothing but rounding: Adam divides
    # that by its own size, and they move by a part of the learning rate.
    assert int((off.abs() >= 1e-5).sum()) <= 5
    assert float(off.abs().max()) < SETTINGS["learning_rate"]


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, groups: list[Group]
) -> Recorded:
    folder = tmp_path_factory.mktemp("alone")
    return asyncio.run(run_of(folder, model_dir, groups, {"size": 1}))


@pytest.mark.parametrize("size", [2, 4])
async def test_several_processes_reproduce_the_curve_of_one_and_exit_cleanly(
    tmp_path: Path, model_dir: Path, groups: list[Group], alone: Recorded, size: int
) -> None:
    assert_same(alone, await run_of(tmp_path, model_dir, groups, {"size": size}))


@pytest.mark.parametrize("sharded", ["true", "false"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
async def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path,
    model_dir: Path,
    groups: list[Group],
    alone: Recorded,
    sizes: tuple[int, int],
    sharded: str,
) -> None:
    kind = {"sharded_checkpoints": sharded}
    first = {"size": sizes[0], "num_steps": NUM_STEPS // 2, **kind}
    world = await run_of(tmp_path, model_dir, groups, first, {"size": sizes[1], **kind})
    assert_same(alone, world)
    parts = list((world.run_dir / "checkpoints").glob("*/parts"))
    assert bool(parts) == (sharded == "true")


async def test_two_processes_publish_the_same_merged_adapters_as_one(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    few = [
        await run_of(tmp_path / f"{size}", model_dir, groups, {"size": size, "num_steps": 5} | LORA)
        for size in (1, 2)
    ]
    assert_same(*few, num_steps=5)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_ends_all_and_the_next_trainer_goes_on(
    tmp_path: Path, model_dir: Path, groups: list[Group], alone: Recorded, victim: int
) -> None:
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), groups) as world:
        trainer = Trainer(world, size=2, num_steps=NUM_STEPS, checkpoint_every=5)
        await trainer.until(lambda: len(world.train_rows) >= 7)
        ranks = trainer.ranks()
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[victim], signal.SIGKILL)
        started = time.monotonic()
        assert await trainer.end() == 1
        assert time.monotonic() - started < 100, "far below the time-out of a collective"
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
        log = trainer.log.rename(tmp_path / "log of the killed").read_text()
        assert f"dialoop trainer: Rank {victim} was ended by signal 9." in log
        assert "Traceback" not in log
        await train(world, size=2, checkpoint_every=5)
        assert_same(alone, world)


async def test_torchrun_starts_it_too(tmp_path: Path, model_dir: Path, groups: list[Group]) -> None:
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), groups) as world:
        trainer = Trainer(world, size=2, under_torchrun=True, num_steps=3)
        try:
            await trainer.until((world.run_dir / "trainer.json").is_file)
            ranks = trainer.ranks()
            assert sorted(ranks) == [0, 1]
        finally:
            trainer.process.send_signal(signal.SIGTERM)
            await trainer.end()
        log = trainer.log.read_text()
        assert "terminate called" not in log
        assert "exitcode: -9" not in log
        assert len(curve(world)) == 3


async def test_ranks_that_are_out_of_step_after_a_failed_write_end_with_its_reason(
    tmp_path: Path, model_dir: Path
) -> None:
    """The first rank cannot write, so the others wait for it in vain: all end, and say why."""
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), []) as world:
        reason = tmp_path / "reason.json"
        trainer = Trainer(world, size=2, num_steps=0, reason=reason)
        try:
            await trainer.until(lambda: "Serving." in trainer.log.read_text())
            address = re.search(r"Serving\..*address=([\d.:]+)", trainer.log.read_text())
            assert address is not None
            async with Channel(address[1]) as channel:
                client = TrainerClient(channel)
                while (await client.get_status()).phase is not Phase.DONE:
                    await asyncio.sleep(0.05)
                limit = (1_000_000, resource.RLIM_INFINITY)
                resource.prlimit(trainer.ranks()[0], resource.RLIMIT_FSIZE, limit)
                with pytest.raises(DialoopError):
                    await client.publish()
            assert await trainer.end() == 1
        finally:
            trainer.process.kill()
    assert "File too large" in json.loads(reason.read_text())["message"]


NODE = "dialoop_services.trainer.learner.launch 1 --num-nodes 2 --rendezvous"
OTHER_VERSION = "import dialoop\ndialoop.__version__ = '0.0.1'\n"
OTHER_DISK = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')


@pytest.mark.parametrize(
    ("second", "code", "says"),
    [
        ("never comes", 1, "node 1 of the trainer's 2 did not come to 127.0.0.1:"),
        ("other version", CONFIG_ERROR, "have different versions of Dialoop: node 0"),
        ("other disk", CONFIG_ERROR, "is another one on node 1"),
    ],
)
def test_nodes_that_cannot_train_together_all_end_with_the_one_error_that_says_why(
    tmp_path: Path, second: str, code: int, says: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(node: int, *before: str, paths: Sequence[Path] = ()) -> subprocess.Popen[str]:
        found = map(str, (*paths, ROOT, ROOT / "client", ROOT / "services"))
        module = ("-m", *NODE.split(), meeting, "--node", str(node))
        return subprocess.Popen(
            [*before, sys.executable, *module],
            env={n: v for n, v in os.environ.items() if not n.startswith("DIALOOP_")}
            | {"PYTHONPATH": os.pathsep.join(found)}
            | {"DIALOOP_TRAINER_RUN_DIR": str(tmp_path / "run")},
            stderr=subprocess.PIPE,
            text=True,
        )

    nodes = [start(0)]
    if second == "other version":
        nodes.append(start(1, paths=[tmp_path]))
    elif second == "other disk":
        if os.geteuid():
            pytest.skip("only root mounts a disk")
        nodes.append(start(1, *OTHER_DISK, str(tmp_path / "run")))
    for node in nodes:
        words = node.communicate(timeout=300)[1]
        assert node.returncode == code, words
        assert says in words
        assert "Traceback" not in words
