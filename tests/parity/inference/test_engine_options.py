"""[inference.engine] in a real vLLM: options arrive, tokens stay exact, bad values are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dialoop.errors import InvalidConfig
from dialoop_services.inference.engine import EngineOptions

from tests.parity.inference.test_engines import (
    MAX_MODEL_LEN,
    forward_logprobs,
    prompts,
    save_model,
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


async def start(model_dir: Path, **own: Any) -> Any:
    from dialoop_services.inference.vllm_engine.engine import VllmEngine

    save_model(model_dir, seed=0, tied=True)
    return await VllmEngine.start(model_dir, EngineOptions(max_model_len=MAX_MODEL_LEN, own=own))


async def test_options_reach_vllm_and_its_log_probs_are_those_of_the_model(tmp_path: Path) -> None:
    engine = await start(
        tmp_path / "model",
        enable_prefix_caching=False,
        block_size=32,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
    )
    try:
        config = engine._llm.vllm_config
        assert config.cache_config.enable_prefix_caching is False
        assert config.cache_config.block_size == 32
        assert config.scheduler_config.max_num_batched_tokens == 64
        for prompt in prompts(3, shortest=70):  # longer than a batch
            scored = await engine.logprobs(prompt)
            expected = forward_logprobs(prompt, seed=0, tied=True)
            assert np.abs(scored.logprobs - expected).max() < 1e-5
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("option", "value"), [("block_size", "many"), ("scheduling_policy", "by_luck")]
)
async def test_a_value_that_vllm_does_not_take_is_named(
    tmp_path: Path, option: str, value: object
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        await start(tmp_path / "model", **{option: value})
    assert repr(value) in str(caught.value)
    assert "[inference.engine]" in caught.value.remedy
