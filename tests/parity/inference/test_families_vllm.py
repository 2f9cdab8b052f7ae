"""vLLM for CPU samples what the trainer scores and serves what it publishes, family by family.

Each case starts vLLM, so all of them are heavy: half a minute each. The models are wider than those
of `make models`, because vLLM's attention on a CPU needs heads of 32 numbers or more.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from dialoop.errors import DialoopError, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.vllm_engine.environment import prepare
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

from benchmarks.servers.families import FAMILIES, VLLM_CPU_REFUSES, make_family

if TYPE_CHECKING:
    from dialoop_services.inference.vllm_engine.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.heavy(reason="every family starts vLLM"),
    pytest.mark.timeout(180),
]
WIDE = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
PROBE = [5, 9, 17, 30, 7, 6, 40, 41, 42, 43, 44, 45, 46, 47, 48]
VERSION = PolicyVersion(lineage="main", number=1)


async def start(model_dir: Path) -> VllmEngine:
    prepare()
    from dialoop_services.inference.vllm_engine.engine import VllmEngine

    options = EngineOptions(max_model_len=64, max_num_seqs=4, kv_cache_bytes=64 << 20)
    return await VllmEngine.start(model_dir, options)


def learner_of(model_dir: Path) -> Learner:
    return Learner(TrainerSettings(model_dir=model_dir, run_dir=model_dir.parent / "run"))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in VLLM_CPU_REFUSES])
async def test_it_samples_and_serves_what_the_trainer_has(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name, fields=WIDE)
    learner = learner_of(model_dir)
    engine = await start(model_dir)
    try:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=1)
        (answer,) = await engine.sample(PROBE[:4], sampling, stop=StopTokens(), num_samples=1)
        (own,) = learner.logprobs([[*PROBE[:4], *answer.token_ids]])
        np.testing.assert_allclose(answer.logprobs, own[-24:], atol=1e-4)
        with torch.no_grad():
            for weight in learner.state.policy.causal_lm.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
        weights = learner.export(tmp_path / "out" / "model.safetensors")
        await engine.load_weights(weights.path, VERSION)
        served = await engine.logprobs(PROBE)
    finally:
        await engine.close()
    assert served.policy_version == VERSION
    np.testing.assert_allclose(served.logprobs, learner.logprobs([PROBE])[0], atol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
async def test_new_experts_are_refused_and_the_first_ones_are_served(
    tmp_path: Path, name: str
) -> None:
    model_dir = make_family(name, tmp_path / name, fields=WIDE)
    learner = learner_of(model_dir)
    weights = learner.export(tmp_path / "out" / "model.safetensors")
    engine = await start(model_dir)
    try:
        with pytest.raises(PreconditionFailed) as caught:
            await engine.load_weights(weights.path, VERSION)
        served = await engine.logprobs(PROBE)
    finally:
        await engine.close()
    assert caught.value.reason == "MODEL_NOT_PUBLISHABLE"
    assert name in VLLM_CPU_REFUSES
    assert served.policy_version != VERSION
    np.testing.assert_allclose(served.logprobs, learner.logprobs([PROBE])[0], atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
async def test_latent_attention_is_refused(tmp_path: Path, name: str) -> None:
    model_dir = make_family(name, tmp_path / name)
    assert name in VLLM_CPU_REFUSES

    async def score() -> None:
        engine = await start(model_dir)
        try:
            await engine.logprobs(PROBE)
        finally:
            await engine.close()

    with pytest.raises(DialoopError):
        await score()
