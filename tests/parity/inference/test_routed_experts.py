"""The experts that the transformers engine records are those that the model chooses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from dialoop.episode import UpdateMode
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.experts import chosen_experts, routers_of, watch_routers
from dialoop_learning.rl.routed_experts import experts_column
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.transformers_engine.engine import TransformersEngine, load_model
from safetensors.torch import load_file, save_file

from benchmarks.servers.families import make_family

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
PROMPTS = ([5, 9, 17, 30], [7, 6, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
NUM_TOKENS = 12
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=NUM_TOKENS, seed=3)
OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=4, records_experts=True)


def chosen_by(model_dir: Path, ids: list[int]) -> np.ndarray:
    """The sorted experts [L, layers, k] of one pass over all ids, without a cache."""
    model = load_model(model_dir, torch.float32)
    with torch.no_grad(), watch_routers(routers_of(model)) as routed:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return np.sort(chosen_experts(routed).numpy(), axis=-1)


@pytest.mark.parametrize("name", FAMILIES)
async def test_they_are_those_of_one_pass_over_all_tokens(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name)
    engine = await TransformersEngine.start(model_dir, OPTIONS)
    try:  # prompts of different lengths, twice each, and more of them than places
        several = await asyncio.gather(
            *(engine.sample(ids, SAMPLING, stop=StopTokens(), num_samples=3) for ids in PROMPTS)
        )
    finally:
        await engine.close()
    routing = engine.routing
    assert routing is not None
    assert (routing.num_layers, routing.num_experts) == (len(routers_of(engine._model)), 4)
    num_used = set()
    for ids, samples in zip(PROMPTS, several, strict=True):
        for sample in samples:
            whole = [*ids, *sample.token_ids]
            recorded = sample.routed_experts
            assert recorded.shape == (len(whole) - 1, routing.num_layers, routing.top_k)
            expected = chosen_by(model_dir, whole)
            np.testing.assert_array_equal(np.sort(recorded, axis=-1), expected[:-1])
            num_used |= set(recorded[:, 0].flatten().tolist())
            column = experts_column(routing, recorded, len(whole))
            assert column.values.dtype == np.uint8
            assert (column.values[-1] == 255).all()
    assert len(num_used) > routing.top_k  # so that equal choices are no accident


async def test_after_a_load_they_are_those_of_the_new_weights(tmp_path: Path) -> None:
    model_dir = make_family("qwen3_moe", tmp_path / "old")
    tensors = load_file(model_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    new_dir = make_family("qwen3_moe", tmp_path / "new")
    save_file(tensors, new_dir / "model.safetensors", metadata={"format": "pt"})
    engine = await TransformersEngine.start(model_dir, OPTIONS)
    version = PolicyVersion(lineage="main", number=1)
    tokens = asyncio.Event()
    try:
        streaming = asyncio.ensure_future(
            engine.stream(
                PROMPTS[0],
                SamplingParams(max_new_tokens=40, seed=1),
                stop=StopTokens(),
                on_tokens=lambda _: tokens.set(),
            )
        )
        await tokens.wait()
        path = new_dir / "model.safetensors"
        await engine.load_weights(path, version, mode=UpdateMode.RECOMPUTE)
        sample = await streaming
    finally:
        await engine.close()
    assert len(sample.versions) == 2
    expected = chosen_by(new_dir, [*PROMPTS[0], *sample.token_ids])
    assert (expected != chosen_by(model_dir, [*PROMPTS[0], *sample.token_ids])).any()
    np.testing.assert_array_equal(np.sort(sample.routed_experts, axis=-1), expected[:-1])


async def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model_dir = make_family("qwen3", tmp_path / "qwen3")
    with pytest.raises(InvalidConfig, match="the model has no experts") as caught:
        await TransformersEngine.start(model_dir, OPTIONS)
    assert caught.value.reason == "NO_ROUTED_EXPERTS"
    engine = await TransformersEngine.start(model_dir, EngineOptions(max_model_len=64))
    try:
        (sample,) = await engine.sample(PROMPTS[0], SAMPLING, stop=StopTokens())
    finally:
        await engine.close()
    assert engine.routing is None
    assert sample.routed_experts is None
