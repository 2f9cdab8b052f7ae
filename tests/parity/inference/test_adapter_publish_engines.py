"""A policy published as its adapter is, in each engine, the policy published whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from dialoop.clients.weights import WeightsKind, WeightsManifest
from dialoop.episode import UpdateMode
from dialoop.errors import PreconditionFailed
from dialoop.trajectory import SamplingParams
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.lora.layers import ADAPTER
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import load_file, save_file

from tests.support.engine_world import KINDS, NO_STOP, prompts, save_model, start, version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop_services.inference.engine import Engine
    from dialoop_services.trainer.learner.learner_state import ExportedWeights

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS = prompts(4, shortest=20)


class World:
    """A learner with adapters, and a replica that gets its policies either way."""

    def __init__(self, engine: Engine, learner: Learner, root: Path) -> None:
        async def report(serving: bool) -> None:
            self.serving = serving

        self.engine, self.learner, self.root, self.number = engine, learner, root, 0
        self.replica = Replica(engine, weights_root=root, report=report)

    def learn(self) -> None:
        generator = torch.Generator().manual_seed(self.number + 1)
        with torch.no_grad():
            for parameter in self.learner.state.policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def announce(self, name: str) -> tuple[WeightsManifest, ExportedWeights]:
        self.number += 1
        weights = self.learner.export(self.root / str(self.number) / name)
        return WeightsManifest(
            policy_version=version(self.number),
            sha256=weights.sha256,
            num_bytes=weights.num_bytes,
            path=f"{self.number}/{name}",
            kind=weights.kind,
            adapter_config_json=weights.adapter_config_json,
            base_digest=weights.base_digest,
        ), weights

    async def publish(self, name: str, **changes: Any) -> ExportedWeights:
        manifest, weights = self.announce(name)
        await self.replica.load(replace(manifest, **changes), _nothing())
        return weights

    async def scores(self) -> list[np.ndarray]:
        return [scored.logprobs for scored in await self.replica.logprobs(ROWS)]

    def trainer_logprobs(self) -> list[np.ndarray]:
        return list(self.learner.logprobs(ROWS))


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def largest(logprobs: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(logprobs, expected, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    kind, tied = request.param
    folder = tmp_path_factory.mktemp("adapters")
    model_dir = save_model(folder / "model", seed=0, tied=tied)
    learner = Learner(
        TrainerSettings(model_dir=model_dir, model={"lora_rank": 4, "lora_alpha": 12.0})
    )
    engine = await start(kind, model_dir)
    yield World(engine, learner, folder)
    await engine.close()


async def test_an_adapter_gives_the_policy_that_whole_weights_give(world: World) -> None:
    before = await world.scores()
    for _ in range(3):
        world.learn()
        adapter = await world.publish(ADAPTER)
        added = await world.scores()
        assert largest(added, world.trainer_logprobs()) < 1e-4
        whole = await world.publish("model.safetensors")
        assert largest(added, await world.scores()) == 0.0
        assert adapter.num_bytes < whole.num_bytes / 5
    assert largest(added, before) > 0.1
    assert adapter.kind is WeightsKind.ADAPTER


async def test_answers_under_way_go_on_under_the_sum_and_re_score_exactly(world: World) -> None:
    world.learn()
    await world.publish(ADAPTER)
    at = world.number
    sampling = SamplingParams(max_new_tokens=150)
    seen = asyncio.Event()
    running = asyncio.create_task(
        world.replica.sample(ROWS[0], sampling, stop=NO_STOP, on_tokens=lambda _: seen.set())
    )
    await seen.wait()
    policies = {at: world.root / str(at) / ADAPTER}
    world.learn()
    await world.publish(ADAPTER, update_mode=UpdateMode.RECOMPUTE)
    policies[world.number] = world.root / str(world.number) / ADAPTER
    (sampled,) = await running
    numbers = [span.policy_version.number for span in sampled.versions]
    assert numbers == [at, world.number]
    ids = [*ROWS[0], *sampled.token_ids]
    for span in sampled.versions:
        expected = _scores_of(world, policies[span.policy_version.number], ids)
        part = slice(len(ROWS[0]) + span.start - 1, len(ROWS[0]) + span.start - 1 + span.length)
        own = np.array(sampled.logprobs[span.start : span.start + span.length])
        assert np.abs(own - expected[part]).max() < 1e-4


def _scores_of(world: World, adapter: Path, ids: list[int]) -> np.ndarray:
    from dialoop_learning.lora.base_weights import adapted_tensors

    base = world.engine.base_weights
    tensors = dict(adapted_tensors(adapter.parent, base, digest=base.digest()))
    model = _model_like(world)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
    return rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def _model_like(world: World) -> Any:
    from transformers import AutoModelForCausalLM

    directory = world.engine.base_weights.files[0].parent
    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


async def test_what_is_not_of_this_base_changes_nothing(world: World, tmp_path: Path) -> None:
    world.learn()
    await world.publish(ADAPTER)
    before = await world.scores()
    other = save_model(tmp_path / "other", seed=9, tied=world.engine.base_weights.tied)
    wrong = BaseWeights.of(other).digest()
    for changes in ({"base_digest": wrong}, {"adapter_config_json": _with_rank(world, 8)}):
        with pytest.raises(PreconditionFailed) as caught:
            await world.publish(ADAPTER, **changes)
        assert caught.value.reason in ("BASE_MISMATCH", "ADAPTER_MISMATCH")
        assert not world.replica.fault
        assert largest(await world.scores(), before) == 0.0


def _with_rank(world: World, rank: int) -> str:
    import json

    manifest, _ = world.announce(ADAPTER)
    return json.dumps({**json.loads(manifest.adapter_config_json), "r": rank})


async def test_a_base_in_half_precision_is_added_to_in_the_trainers(
    world: World, tmp_path: Path
) -> None:
    """The base as the trainer holds it, not as it lies on disk, is what the adapter is added to."""
    base = world.engine.base_weights
    half = {k: v.bfloat16() for file in base.files for k, v in load_file(file).items()}
    save_file(half, tmp_path / "model.safetensors")
    narrow = BaseWeights(files=(tmp_path / "model.safetensors",), tied=base.tied)
    world.learn()
    manifest, weights = world.announce(ADAPTER)
    added = dict(narrow.with_adapter(load_file(weights.path), scaling=3.0))
    assert {tensor.dtype for tensor in added.values()} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj"
    adapter = load_file(weights.path)
    delta = (
        adapter[f"base_model.model.{name}.lora_B.weight"]
        @ adapter[f"base_model.model.{name}.lora_A.weight"]
    )
    assert torch.equal(added[f"{name}.weight"], half[f"{name}.weight"].float() + 3.0 * delta)
    assert manifest.base_digest != narrow.digest()
