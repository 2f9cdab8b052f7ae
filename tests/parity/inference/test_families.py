"""The transformers engine samples what the trainer scores, for every family of models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.learning.model.families import FAMILIES, make_family
from dialoop_services.learning.model.policy import load_policy
from dialoop_services.learning.packing.rows import TokenRow, pack_rows

PROMPTS = ([5, 9, 17, 30], [7, 6, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
NUM_TOKENS = 24


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
        asked = await engine.logprobs([*PROMPTS[0], *both[0][0].token_ids])
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
    np.testing.assert_allclose(asked.logprobs[-NUM_TOKENS:], scores[0].numpy(), atol=1e-4)
