"""A LoRA policy published as its adapter: the replica adds it into its base, or says why not."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from dialoop.clients.inference import WeightsKind
from dialoop.errors import DataLost, InvalidConfig, InvalidInput, PreconditionFailed, Unsupported
from dialoop.sequences import PolicyVersion
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.model.weight_files import INDEX
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish import publisher as publisher_module
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.settings import TrainerSettings
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from tests.support.inference_world import World, assert_refused, model_dir, world  # noqa: F401
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.learner.learner_state import ExportedWeights

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [[1, 2, 3, 4, 5, 6, 7, 8], [250, 9, 9, 100]]


class FakeReplay:
    async def advance_policy(self, run: str, version: PolicyVersion, **_: Any) -> int:
        return 0


class Trainer:
    """A learner with adapters that publishes to one replica."""

    def __init__(
        self, w: World, model_dir: Path, *, publish: str = "", rank: int = 4, **settings: Any
    ) -> None:
        lora = {"lora_rank": rank, "lora_alpha": 3.0 * rank, "publish": publish}
        self.run_dir = w.root.parent
        chosen = TrainerSettings(model_dir=model_dir, run_dir=self.run_dir, model=lora, **settings)
        self.learner, self.number = Learner(chosen), 0
        self.publisher = Publisher(chosen, self.learner, [w.client], cast("Any", FakeReplay()))

    def learn(self) -> None:
        """The adapters move; the base cannot."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            for parameter in self.learner.state.policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    async def publish(self) -> Any:
        self.learn()
        return await self.publisher.publish(PolicyVersion(lineage="main", number=self.number))

    def manifest(self, path: Path) -> tuple[Any, ExportedWeights]:
        self.learn()
        weights = self.learner.export(path)
        version = PolicyVersion(lineage="main", number=self.number)
        return replace(self.publisher._manifest(version, weights)), weights


async def served_logprobs(w: World) -> list[np.ndarray]:
    return list((await w.client.logprobs(IDS)).logprobs)


def largest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


async def test_a_replica_adds_the_adapter_into_its_base_as_the_trainer_would(model_dir, tmp_path):
    """Bit for bit what a merged publish gives, by each way that bytes can come."""
    root = tmp_path / "policies"
    async with world(model_dir, root) as w:
        trainer = Trainer(w, model_dir)
        before = await served_logprobs(w)
        for _ in range(2):
            published = await trainer.publish()
            assert published.max_logprob_difference < 1e-5
            added = await served_logprobs(w)
            assert largest(added, trainer.learner.logprobs(IDS)) < 1e-5
        assert largest(added, before) > 0.1
        policy = root / "main-2"
        assert {p.name for p in policy.iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
        }
        whole = trainer.learner.export(tmp_path / "whole.safetensors")
        assert published.weights.num_bytes < whole.num_bytes / 5
        model = w.replica.engine._model.state_dict()
        assert all(torch.equal(model[k], v) for k, v in load_file(whole.path).items())


@pytest.mark.parametrize("plane", ["chunks", "shared_memory"])
async def test_an_adapter_comes_by_each_way_that_moves_files(plane, model_dir, tmp_path):
    root, folder = tmp_path / "policies", tmp_path / "memory"
    weights_root = folder if plane == "shared_memory" else root
    async with world(model_dir, weights_root, reads_root=plane == "shared_memory") as w:
        memory = {"shared_memory_dir": folder} if plane == "shared_memory" else {}
        trainer = Trainer(w, model_dir, data_plane=plane, **memory)
        published = await trainer.publish()
        assert published.weights.kind is WeightsKind.ADAPTER
        assert largest(await served_logprobs(w), trainer.learner.logprobs(IDS)) < 1e-5


@pytest.mark.parametrize("memory", [False, True])
async def test_a_replica_that_starts_late_adds_the_newest_adapter(memory, model_dir, tmp_path):
    root = tmp_path / "memory" if memory else tmp_path / "policies"
    async with world(model_dir, root) as w:
        extra = {"shared_memory_dir": root} if memory else {}
        trainer = Trainer(w, model_dir, **extra)
        for _ in range(3):
            await trainer.publish()
    async with world(model_dir, root) as restarted:
        scored = await restarted.client.logprobs(IDS)
        assert scored.policy_version == PolicyVersion(lineage="main", number=3)
        assert largest(list(scored.logprobs), trainer.learner.logprobs(IDS)) < 1e-5


async def test_an_adapter_of_another_base_is_refused_and_the_old_policy_serves_on(
    model_dir, tmp_path, monkeypatch
):
    other = make_tiny_model(tmp_path / "other", seed=7)
    root = tmp_path / "policies"
    async with world(model_dir, root) as w:
        trainer = Trainer(w, model_dir)
        await trainer.publish()
        before, theirs = await served_logprobs(w), Trainer(w, other)
        theirs.number = 5
        with pytest.raises(PreconditionFailed, match="trained on weights sha256:") as caught:
            await theirs.publish()
        assert caught.value.reason == "BASE_MISMATCH"
        status = await w.client.get_policy()
        assert (status.ready, status.policy_version.number) == (True, 1)
        assert largest(await served_logprobs(w), before) == 0


def faulty(good: Any, weights: ExportedWeights) -> list[tuple[Any, bytes, type, str]]:
    """What may be wrong with an adapter: its manifest, its bytes, and the error that says so."""
    data, tensors = weights.path.read_bytes(), load_file(weights.path)

    def config(**changes: Any) -> Any:
        config_json = json.dumps({**json.loads(good.adapter_config_json), **changes})
        return replace(good, adapter_config_json=config_json)

    def rewritten(name: str, tensor: torch.Tensor) -> tuple[Any, bytes]:
        bad = save({**tensors, name: tensor})
        digest = hashlib.sha256(bad).hexdigest()
        return replace(good, num_bytes=len(bad), sha256=digest), bad

    name = next(name for name in tensors if ".lora_A." in name)
    nan, wide = tensors[name] * float("nan"), torch.zeros(8, tensors[name].shape[1])
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    nowhere = "base_model.model.no.lora_A.weight"
    return [
        (good, flipped, DataLost, "CHECKSUM_MISMATCH"),
        (good, data[:-4], InvalidInput, "MANIFEST_MISMATCH"),
        (config(r=8), data, PreconditionFailed, "ADAPTER_MISMATCH"),
        (config(use_dora=True), data, Unsupported, "ADAPTER_UNSUPPORTED"),
        (replace(good, adapter_config_json="{}"), data, InvalidInput, "INVALID_ADAPTER_CONFIG"),
        (replace(good, base_digest=""), data, InvalidInput, "MANIFEST_MISMATCH"),
        (replace(good, adapter="style"), data, InvalidInput, "MANIFEST_MISMATCH"),
        (*rewritten(name, wide), PreconditionFailed, "ADAPTER_MISMATCH"),
        (*rewritten(name, nan), InvalidInput, "ADAPTER_NOT_FINITE"),
        (*rewritten(nowhere, wide), PreconditionFailed, "ADAPTER_MISMATCH"),
    ]


async def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "policies") as w:
        trainer = Trainer(w, model_dir)
        await trainer.publish()
        before = await served_logprobs(w)
        good, weights = trainer.manifest(tmp_path / "next" / "adapter_model.safetensors")
        for manifest, data, kind, reason in faulty(good, weights):
            await assert_refused(w.client.load_weights(manifest, [data]), kind, reason)
            assert (await w.client.get_policy()).ready
            assert largest(await served_logprobs(w), before) == 0
        await w.client.load_weights(good, [weights.path.read_bytes()])
        assert largest(await served_logprobs(w), trainer.learner.logprobs(IDS)) < 1e-5


async def test_a_replica_that_was_away_is_sent_the_adapter_in_chunks(
    model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(publisher_module, "_LOOK_EVERY_S", 0.02)
    async with world(model_dir, tmp_path / "policies", reads_root=False) as w:
        trainer = Trainer(w, model_dir, data_plane="chunks")
        await trainer.publish()
        w.replica.engine._policy_version = PolicyVersion(lineage="base", number=0)
        keeping_up = asyncio.create_task(trainer.publisher.keep_up())
        async with asyncio.timeout(PATIENCE_S):
            while (await w.client.get_policy()).policy_version.number != 1:
                await asyncio.sleep(0.02)
        keeping_up.cancel()


async def test_old_adapters_go_as_old_policies_do(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "policies") as w:
        trainer = Trainer(w, model_dir, keep_policies=2)
        for _ in range(4):
            await trainer.publish()
        kept = sorted(p.name for p in (tmp_path / "policies").iterdir() if p.is_dir())
        assert kept == ["main-1", "main-3", "main-4"]


async def test_whole_weights_may_come_between_adapters(model_dir, tmp_path):
    """The base below an adapter is the model directory's, whatever was served before."""
    async with world(model_dir, tmp_path / "policies") as w:
        merged = Trainer(w, model_dir, publish="merged")
        published = await merged.publish()
        assert published.weights.path.name == "model.safetensors"
        assert largest(await served_logprobs(w), merged.learner.logprobs(IDS)) < 1e-5
        adapted = Trainer(w, model_dir)
        adapted.number = 1
        await adapted.publish()
        assert largest(await served_logprobs(w), adapted.learner.logprobs(IDS)) < 1e-5


def test_the_digest_is_of_the_weights_and_not_of_how_they_lie_in_files(model_dir, tmp_path):
    whole = BaseWeights.of(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    names = sorted(tensors, reverse=True)
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    for part, some in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"{part}.safetensors")
    places = {name: f"{index % 2}.safetensors" for index, name in enumerate(names)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert BaseWeights.of(tmp_path).digest() == whole.digest()
    some_name = names[0]
    changed = tensors[some_name].clone()
    changed.view(-1)[-1] += 1e-3
    save_file(
        {name: changed if name == some_name else tensors[name] for name in names[::2]},
        tmp_path / "0.safetensors",
    )
    assert BaseWeights.of(tmp_path).digest() != whole.digest()


def test_the_adapters_file_says_whose_it_is(model_dir, tmp_path):
    settings = TrainerSettings(model_dir=model_dir, model={"lora_rank": 2})
    weights = Learner(settings).export(tmp_path / "adapter_model.safetensors")
    with safe_open(weights.path, framework="pt") as file:
        assert file.metadata()["base_digest"] == weights.base_digest
    assert weights.base_digest == BaseWeights.of(model_dir).digest()


@pytest.mark.parametrize(
    ("model", "plane", "says"),
    [
        ({"publish": "adapter"}, "chunks", "needs a lora_rank"),
        ({"lora_rank": 2, "publish": "adapter"}, "nccl", "moves whole tensors only"),
    ],
)
def test_an_adapter_that_cannot_travel_is_a_mistake_of_the_config(model, plane, says):
    with pytest.raises(InvalidConfig, match=says):
        load(TrainerSettings, model=model, data_plane=plane)
    with pytest.raises(ValueError, match=says):
        JobConfig.model_validate({"model": model, "inference": {"data_plane": plane}})


def test_lora_publishes_the_adapter_unless_only_tensors_can_travel():
    def of(**settings):
        return TrainerSettings(**settings).publishes_adapters

    lora = {"lora_rank": 2}
    assert of(model=lora)
    assert of(model=lora, data_plane="chunks")
    assert not of(model=lora, data_plane="nccl")
    assert not of(model={**lora, "publish": "merged"})
    assert not of()


def test_everyone_in_a_lora_run_has_the_base_from_one_directory(tmp_path):
    """What is published is the trainer's to know; the scorer's reference is the base itself."""
    config = JobConfig.model_validate({"model": {"lora_rank": 4, "publish": "merged"}})
    run_dir = RunDir(path=tmp_path, run_id="r-1")
    layout = Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))
    services = ("trainer", "inference", "scorer")
    assert len({layout.values_of(service)["model_dir"] for service in services}) == 1
    trainer_settings = TrainerSettings.model_validate(
        {"model": layout.values_of("trainer")["model"]}
    )
    assert (trainer_settings.model.lora_rank, trainer_settings.model.publish) == (4, "merged")
