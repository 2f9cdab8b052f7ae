"""The transformers engine samples what the trainer scores and serves what it publishes.

For every family of models; the table in docs/families.md stands on these tests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dialoop.clients.weights import WeightsKind
from dialoop.errors import DataLost, InvalidConfig, Unsupported
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_learning.lora.adapter_config import AdapterConfig
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.lora.layers import ADAPTER
from dialoop_learning.model.checkpoint_names import to_checkpoint
from dialoop_learning.model.policy import load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.transformers_engine.engine import (
    TransformersEngine,
    copy_weights,
    load_model,
)
from dialoop_services.inference.weights.loadable import PolicyAdapter
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import load_file

from benchmarks.servers.families import FAMILIES, make_family

PROMPTS = ([5, 9, 17, 30], [7, 6, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
NUM_TOKENS = 24
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_engines_logprobs_are_the_trainers(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name)
    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    engine = await TransformersEngine.start(model_dir, options)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_TOKENS, seed=3)
    try:  # prompts of different lengths are decoded in one batch
        both = await asyncio.gather(
            *(engine.sample(ids, sampling, stop=StopTokens(), num_samples=2) for ids in PROMPTS)
        )
        again = await engine.logprobs([*PROMPTS[0], *both[0][0].token_ids])
    finally:
        await engine.close()
    samples = [(ids, answer) for ids, own in zip(PROMPTS, both, strict=True) for answer in own]
    rows = [
        TokenRow.from_demonstration(
            [*ids, *answer.token_ids], [False] * len(ids) + [True] * NUM_TOKENS
        )
        for ids, answer in samples
    ]
    policy = load_policy(model_dir)
    with torch.no_grad():
        batch = pack_rows(rows)
        scores = batch.split(policy(batch).logprobs)
    for own, (_, answer) in zip(scores, samples, strict=True):
        np.testing.assert_allclose(own.numpy(), answer.logprobs, atol=1e-4)
    np.testing.assert_allclose(again.logprobs[-NUM_TOKENS:], scores[0].numpy(), atol=1e-4)


def changed_learner(model_dir: Path) -> Learner:
    """A learner of which every weight has moved."""
    learner = Learner(TrainerSettings(model_dir=model_dir, run_dir=model_dir.parent / "run"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in learner.state.policy.causal_lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)
    return learner


@pytest.mark.parametrize("name", FAMILIES)
async def test_what_is_published_is_served_and_restored(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name)
    learner = changed_learner(model_dir)
    weights = learner.export(tmp_path / "out" / "model.safetensors")
    # The checkpoint's own names, which vLLM and other programs read.
    names = set(BaseWeights.of(model_dir).shapes())
    assert set(load_file(weights.path)) >= names - {"lm_head.weight"}
    probe = [*PROMPTS[1], *range(20, 40)]
    (own,) = learner.logprobs([probe])
    engine = await TransformersEngine.start(model_dir, EngineOptions(max_model_len=64))
    try:
        before = await engine.logprobs(probe)
        await engine.load_weights(weights.path, PolicyVersion(lineage="main", number=1))
        after = await engine.logprobs(probe)
    finally:
        await engine.close()
    assert np.abs(before.logprobs - own).max() > 1e-3
    np.testing.assert_allclose(after.logprobs, own, atol=1e-4)
    restored = Learner(TrainerSettings(model_dir=model_dir, run_dir=tmp_path / "run"))
    restored.state.read_weights(weights.path)
    assert np.array_equal(restored.logprobs([probe])[0], own)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_lora_adapter_is_delivered_alone_and_merged(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name)
    targets = LATENT if name.startswith("deepseek") else ()
    lora = {"lora_rank": 4, "lora_alpha": 12.0, "lora_targets": targets}
    learner = Learner(TrainerSettings(model_dir=model_dir, model=lora, run_dir=tmp_path / "run"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in learner.state.policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    alone = learner.export(tmp_path / "out" / ADAPTER)
    merged = learner.export(tmp_path / "out" / "model.safetensors")
    assert alone.kind is WeightsKind.ADAPTER
    assert merged.kind is WeightsKind.WHOLE
    probe = [*PROMPTS[1], *range(20, 40)]
    (own,) = learner.logprobs([probe])
    config = AdapterConfig.from_json(alone.adapter_config_json)
    engine = await TransformersEngine.start(model_dir, EngineOptions(max_model_len=64))
    try:
        before = await engine.logprobs(probe)
        adapter = PolicyAdapter(path=alone.path, scaling=config.scaling)
        await engine.load_onto_base(adapter, PolicyVersion(lineage="main", number=1))
        added = await engine.logprobs(probe)
        await engine.load_weights(merged.path, PolicyVersion(lineage="main", number=2))
        whole = await engine.logprobs(probe)
    finally:
        await engine.close()
    assert np.abs(before.logprobs - own).max() > 1e-2
    np.testing.assert_allclose(added.logprobs, own, atol=1e-4)
    np.testing.assert_allclose(whole.logprobs, own, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_lora_adapter_of_experts_is_refused_with_the_targets_that_remain(
    tmp_path: Path, name: str
) -> None:
    model_dir = make_family(name, tmp_path / name)
    settings = TrainerSettings(
        model_dir=model_dir, model={"lora_rank": 4}, run_dir=tmp_path / "run"
    )
    with pytest.raises(InvalidConfig, match="adapter of experts") as caught:
        Learner(settings)
    assert caught.value.reason == "LORA_TARGET"
    assert all(target in caught.value.remedy for target in LATENT)
    assert "up_proj" not in caught.value.remedy


def test_a_weight_that_does_not_arrive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_family("qwen3", tmp_path / "qwen3")
    published = load_file(changed_learner(model_dir).export(tmp_path / "o" / "m.safetensors").path)
    model = load_model(model_dir, torch.float32)
    missed = "model.layers.1.mlp.up_proj.weight"
    load = model.load_state_dict

    def leaves_one_out(tensors: dict[str, torch.Tensor], *, strict: bool) -> object:
        load({n: t for n, t in tensors.items() if n != missed}, strict=strict)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    monkeypatch.setattr(model, "load_state_dict", leaves_one_out)
    with pytest.raises(DataLost, match=missed) as caught:
        copy_weights(model, dict(published), tied=True)
    assert caught.value.reason == "WEIGHTS_DIFFER"


def test_weights_without_a_place_in_the_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    model = load_model(make_family("qwen3", tmp_path / "qwen3"), torch.float32)
    tensors = {**model.state_dict(), "model.extra.weight": torch.zeros(2)}
    with pytest.raises(Unsupported, match=r"model\.extra\.weight") as caught:
        to_checkpoint(model, tensors, model.state_dict().keys())
    assert caught.value.reason == "MODEL_NOT_PUBLISHABLE"
