"""Weights over each data plane, from a real learner to a served replica: whole, cut and wrong."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from dialoop.clients.inference import WeightsManifest
from dialoop.clients.weights import TransferPhase, TransferStep
from dialoop.errors import (
    DataLost,
    DialoopError,
    InvalidConfig,
    InvalidInput,
    PreconditionFailed,
    Unavailable,
)
from dialoop.sequences import PolicyVersion
from dialoop_learning.model.tiny import make_tiny_model, tiny_config
from dialoop_services.config.own_data_plane import load_data_plane
from dialoop_services.inference.weights.data_planes import _steps
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish import publisher as publisher_module
from dialoop_services.trainer.publish.publisher import Publisher, weights_sender_of
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.inference_world import World, assert_refused, world
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [[1, 2, 3, 4, 5, 6, 7, 8]]
CHUNK = 1 << 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three million parameters: a dozen chunks."""
    from transformers import Qwen2ForCausalLM

    path = make_tiny_model(tmp_path_factory.mktemp("planes") / "model", seed=0)
    config = tiny_config()
    config.hidden_size, config.intermediate_size = 256, 768
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    assert 2.5e6 < sum(p.numel() for p in model.parameters()) < 4e6
    model.save_pretrained(path)
    return path


class FakeReplay:
    async def advance_policy(self, run: str, version: PolicyVersion, **_: Any) -> int:
        return 0


class Trainer:
    """A learner that publishes to one replica, and what it published last."""

    def __init__(self, w: World, model_dir: Path, run_dir: Path, **settings: Any) -> None:
        chosen = TrainerSettings(model_dir=model_dir, run_dir=run_dir, **settings)
        self.learner, self.number = Learner(chosen), 0
        self.publisher = Publisher(chosen, self.learner, [w.client], cast("Any", FakeReplay()))

    def learn(self) -> None:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            parameters = self.learner.state.policy.parameters()
            for parameter in (p for p in parameters if p.requires_grad):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    async def publish(self) -> Any:
        self.learn()
        return await self.publisher.publish(PolicyVersion(lineage="main", number=self.number))

    def manifest(self, folder: Path) -> tuple[WeightsManifest, bytes]:
        """The next policy as a file's bytes."""
        self.learn()
        weights = self.learner.export(folder / "next.safetensors")
        version = PolicyVersion(lineage="main", number=self.number)
        announcement = WeightsManifest(
            policy_version=version, sha256=weights.sha256, num_bytes=weights.num_bytes
        )
        return announcement, weights.path.read_bytes()


def chunks_of(data: bytes) -> Iterator[bytes]:
    return (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


async def serves(w: World, trainer: Trainer) -> None:
    scored = await w.client.logprobs(IDS)
    assert scored.policy_version.number == trainer.number
    assert np.abs(scored.logprobs[0] - trainer.learner.logprobs(IDS)[0]).max() < 1e-5


async def test_a_replica_of_another_host_gets_policies_in_chunks(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", reads_root=False) as w:
        assert (await w.client.get_policy()).data_planes == ("chunks",)
        trainer = Trainer(w, model_dir, tmp_path / "run", data_plane="chunks")
        for _ in range(2):
            published = await trainer.publish()
            assert published.num_replicas == 1
            # A unit in the last place of its log-probs, which are near -150, is 1.5e-5.
            assert published.max_logprob_difference < 1e-4
            await serves(w, trainer)
        assert published.weights.num_bytes > 10 * CHUNK


async def test_a_path_is_refused_where_no_file_can_be_read_and_nothing_changes(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", reads_root=False) as w:
        announcement, _ = Trainer(w, model_dir, tmp_path).manifest(tmp_path)
        load = w.client.load_weights(replace(announcement, path="next.safetensors"))
        await assert_refused(load, PreconditionFailed, "NO_WEIGHTS_ROOT")
        assert (await w.client.get_policy()).ready


async def test_after_a_cut_in_the_middle_the_old_policy_serves_on(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", reads_root=False) as w:
        trainer = Trainer(w, model_dir, tmp_path / "run", data_plane="chunks")
        await trainer.publish()
        before = (await w.client.logprobs(IDS)).logprobs[0]
        announcement, data = trainer.manifest(tmp_path)

        async def cut() -> AsyncIterator[bytes]:
            for index, chunk in enumerate(chunks_of(data)):
                if index == 5:
                    raise ConnectionResetError("the network is gone")
                yield chunk

        with pytest.raises((ConnectionResetError, DialoopError)):
            await w.client.load_weights(announcement, cut())
        await asyncio.sleep(0.2)
        policy = await w.client.get_policy()
        assert (policy.ready, policy.policy_version.number) == (True, 1)
        assert np.array_equal((await w.client.logprobs(IDS)).logprobs[0], before)
        await trainer.publish()
        await serves(w, trainer)


@pytest.mark.parametrize("fault", ["checksum", "short"])
async def test_wrong_bytes_take_the_replica_out_until_the_publisher_sends_again(
    fault, model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(publisher_module, "_LOOK_EVERY_S", 0.05)
    async with world(model_dir, tmp_path / "w", reads_root=False) as w:
        trainer = Trainer(w, model_dir, tmp_path / "run", data_plane="chunks")
        await trainer.publish()
        announcement, data = trainer.manifest(tmp_path)
        if fault == "checksum":
            load = w.client.load_weights(replace(announcement, sha256="0" * 64), chunks_of(data))
            await assert_refused(load, DataLost, "CHECKSUM_MISMATCH")
        else:
            load = w.client.load_weights(announcement, chunks_of(data[: 5 * CHUNK]))
            await assert_refused(load, InvalidInput, "MANIFEST_MISMATCH")
        policy = await w.client.get_policy()
        assert (policy.ready, policy.reason) == (False, "WEIGHTS_BAD")
        keeping_up = asyncio.create_task(trainer.publisher.keep_up())
        async with asyncio.timeout(PATIENCE_S):
            while not (await w.client.get_policy()).ready:
                await asyncio.sleep(0.02)
        keeping_up.cancel()
        assert (await w.client.get_policy()).policy_version.number == 1


async def test_policies_go_through_memory_and_stay_on_disk(model_dir, tmp_path):
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        memory = Path(folder)
        async with world(model_dir, memory) as w:
            assert (await w.client.get_policy()).data_planes == ("shared_memory", "chunks")
            trainer = Trainer(w, model_dir, tmp_path / "run", shared_memory_dir=memory)
            for _ in range(3):
                await trainer.publish()
                await serves(w, trainer)
        in_memory = {path.name for path in memory.iterdir() if path.is_dir()}
        on_disk = {path.name for path in (tmp_path / "run" / "policies").iterdir() if path.is_dir()}
        assert in_memory == {"main-2", "main-3"}
        assert on_disk == {"main-1", "main-2", "main-3"}
        async with world(model_dir, memory) as w:
            assert (await w.client.get_policy()).policy_version.number == 3


async def test_vllms_own_transfer_is_refused_where_it_is_not_set_up(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        version = PolicyVersion(lineage="main", number=1)
        for plane in ("nccl", "ipc", "pigeon"):
            announcement = WeightsManifest(policy_version=version, data_plane=plane, num_bytes=1)
            steps = [TransferStep(phase=TransferPhase.START)]
            load = w.client.load_weights(announcement, steps)
            await assert_refused(load, PreconditionFailed, "DATA_PLANE_UNAVAILABLE")
        assert (await w.client.get_policy()).ready


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("plane", ["nccl", "ipc"])
def test_without_a_cuda_device_the_trainer_says_that_it_needs_one(plane, model_dir, tmp_path):
    settings = TrainerSettings(model_dir=model_dir, run_dir=tmp_path, data_plane=plane)
    with pytest.raises(InvalidConfig) as caught:
        Publisher(settings, Learner(settings), [], cast("Any", FakeReplay()))
    assert caught.value.reason == "NEEDS_CUDA"
    assert "needs a CUDA device" in caught.value.message


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


OWN = """
import os, shutil
from pathlib import Path

class Folder:
    def __init__(self):
        self._root = Path(os.environ["OWN_PLANE"])

    def put(self, path, name):
        shutil.copyfile(path, self._root / name.replace("/", "-"))
        return name.replace("/", "-")

    async def get(self, address, path):
        if (self._root / "down").exists():
            raise ConnectionError("a secret of the plane")
        shutil.copyfile(self._root / address, path)

class Silent(Folder):
    async def get(self, address, path): pass

class Nowhere(Folder):
    def put(self, path, name): pass

class OneSided:
    def put(self, path, name): return name

class Demanding:
    def __init__(self, bucket): pass
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_planes.py").write_text(OWN)
    (tmp_path / "plane").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OWN_PLANE", str(tmp_path / "plane"))
    return tmp_path / "plane"


@pytest.mark.parametrize("settings", [{}, {"model": {"lora_rank": 2}}])
async def test_policies_go_over_a_data_plane_of_ones_own(own_file, settings, model_dir, tmp_path):
    name = "own_planes:Folder"
    async with world(model_dir, tmp_path / "w", reads_root=False, data_plane=name) as w:
        assert (await w.client.get_policy()).data_planes == ("chunks", name)
        trainer = Trainer(w, model_dir, tmp_path / "run", data_plane=name, **settings)
        for _ in range(2):
            published = await trainer.publish()
            assert published.num_replicas == 1
            assert published.max_logprob_difference < 1e-4
            if not settings:
                await serves(w, trainer)
        assert len(list(own_file.iterdir())) == 2


async def test_a_file_that_does_not_come_or_is_another_changes_no_policy(
    own_file, model_dir, tmp_path
):
    name = "own_planes:Folder"
    async with world(model_dir, tmp_path / "w", reads_root=False, data_plane=name) as w:
        announcement, data = Trainer(w, model_dir, tmp_path).manifest(tmp_path)
        (own_file / "next").write_bytes(data)
        addressed = replace(announcement, data_plane=name, path="next")
        (own_file / "down").touch()
        with pytest.raises(Unavailable, match=f"{name}: get raised ConnectionError") as caught:
            await w.client.load_weights(addressed)
        assert caught.value.reason == "DATA_PLANE_FAILED"
        assert "secret" not in str(caught.value)
        assert (await w.client.get_policy()).ready
        (own_file / "down").unlink()
        (own_file / "next").write_bytes(data[:-1] + b"x")
        await assert_refused(w.client.load_weights(addressed), DataLost, "CHECKSUM_MISMATCH")
        (own_file / "next").write_bytes(data)
        await w.client.load_weights(addressed)
        assert (await w.client.get_policy()).ready


@pytest.mark.usefixtures("own_file")
async def test_a_data_plane_that_brings_nothing_is_named(tmp_path):
    for name, method, how in (("Silent", "get", "wrote no file"), ("Nowhere", "put", "no address")):
        plane = load_data_plane(f"own_planes:{name}")
        assert plane is not None
        with pytest.raises(Unavailable, match=f"own_planes:{name}: {method} .*{how}"):
            await (plane.get("a", tmp_path / "b") if method == "get" else plane.put(tmp_path, "a"))


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:P", "'no_such_module:P' cannot be loaded"),
        ("own_planes:OneSided", r"has no get\(address, path\)"),
        ("own_planes:Demanding", "cannot be made: TypeError: .*bucket"),
    ],
)
def test_what_is_no_data_plane_is_refused_at_the_start(name, problem, model_dir, tmp_path):
    settings = TrainerSettings(model_dir=model_dir, run_dir=tmp_path, data_plane=name)
    with pytest.raises(InvalidConfig, match=problem) as caught:
        weights_sender_of(settings)
    assert caught.value.reason == "DATA_PLANE_NOT_FOUND"
    assert caught.value.remedy


async def test_info_of_a_step_that_python_cannot_read_is_refused() -> None:
    async def contents() -> AsyncIterator[Any]:
        yield TransferStep(phase=TransferPhase.START, info_json="[" * 100_000)

    with pytest.raises(InvalidInput, match="not JSON"):
        [step async for step in _steps(contents())]


async def test_the_engine_gets_finish_once_the_stream_has_ended_well() -> None:
    finish = TransferStep(phase=TransferPhase.FINISH)

    async def cut() -> AsyncIterator[Any]:
        yield finish
        raise InvalidInput("The stream ended without its mark.", reason="STREAM_CUT")

    async def longer() -> AsyncIterator[Any]:
        yield finish
        yield finish

    for contents, reason in ((cut(), "STREAM_CUT"), (longer(), "MANIFEST_MISMATCH")):
        with pytest.raises(InvalidInput) as caught:  # and gets no step before
            await anext(_steps(contents))
        assert caught.value.reason == reason
