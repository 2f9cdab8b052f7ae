"""What `dialoop export` writes, in vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dialoop_ops.policies.export import RunPolicies, export_policy
from dialoop_services.inference.engine import EngineOptions

from tests.parity.inference.test_engines import (
    MAX_MODEL_LEN,
    forward_logprobs,
    prompts,
    save_model,
    save_weights,
)

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.heavy(reason="starts vLLM"),
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


async def test_an_exported_policy_loads_in_vllm_and_scores_as_the_published_one(
    tmp_path: Path,
) -> None:
    from dialoop_services.inference.vllm_engine.engine import VllmEngine

    run_dir = tmp_path / "run"
    save_model(run_dir / "model", seed=0, tied=True)
    (run_dir / "run.json").write_text(json.dumps({"config": {"model": {"directory": ""}}}))
    policy = run_dir / "policies" / "main-1"
    policy.mkdir(parents=True)
    save_weights(policy / "model.safetensors", seed=1, tied=True)
    out = export_policy(RunPolicies.of(run_dir), "main-1", tmp_path / "out")
    engine = await VllmEngine.start(out, EngineOptions(max_model_len=MAX_MODEL_LEN))
    try:
        for prompt in prompts(3, shortest=20):
            scored = await engine.logprobs(prompt)
            expected = forward_logprobs(prompt, seed=1, tied=True)
            assert np.abs(scored.logprobs - expected).max() < 1e-5
    finally:
        await engine.close()
