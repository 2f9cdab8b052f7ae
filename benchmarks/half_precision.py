"""Measure how far an engine in bfloat16 is from the trainer, by depth, for three model families.

A tiny model of each family samples one answer of 8,000 tokens in bfloat16, with its cache of keys
and values. The trainer scores the same tokens in float32, in float32 with autocast to bfloat16, and
in bfloat16. For comparison the engine samples in float32, too. Differences are in nats;
`mismatch_kl` is the mean of r - 1 - log r.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.policy import load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.rl.buckets import mismatch_by_depth
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

from benchmarks.servers.families import make_family
from benchmarks.servers.figures import print_figures

PROMPT = list(range(5, 13))
TRAINERS = {
    "float32": ("float32", None),
    "autocast": ("float32", torch.bfloat16),
    "bfloat16": ("bfloat16", None),
}


async def sample(model_dir: Path, dtype: str, num_tokens: int) -> tuple[list[int], np.ndarray]:
    options = EngineOptions(max_model_len=num_tokens + len(PROMPT), max_num_seqs=1, dtype=dtype)
    engine = await TransformersEngine.start(model_dir, options)
    try:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, seed=1)
        (answer,) = await engine.sample(PROMPT, sampling, stop=StopTokens(), num_samples=1)
    finally:
        await engine.close()
    return list(answer.token_ids), np.array(answer.logprobs)


@torch.no_grad()
def score(model_dir: Path, ids: list[int], trainer: str) -> np.ndarray:
    dtype, autocast = TRAINERS[trainer]
    policy = load_policy(model_dir, dtype=dtype)
    policy.autocast = autocast
    row = TokenRow.from_demonstration(PROMPT + ids, [False] * len(PROMPT) + [True] * len(ids))
    batch = pack_rows([row])
    (logprobs,) = batch.split(policy(batch).logprobs)
    return logprobs.double().numpy()


def measure(family: str, num_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        fields = {"max_position_embeddings": num_tokens + len(PROMPT)}
        model_dir = make_family(family, Path(folder) / family, fields=fields)
        rows = {}
        for engine in ("float32", "bfloat16"):
            ids, theirs = asyncio.run(sample(model_dir, engine, num_tokens))
            depths = np.arange(len(PROMPT), len(PROMPT) + len(ids))
            for trainer in TRAINERS if engine == "bfloat16" else ("float32",):
                differences = score(model_dir, ids, trainer) - theirs
                rows[f"engine {engine}, trainer {trainer}"] = mismatch_by_depth(depths, differences)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="qwen3,llama3,gemma2")
    parser.add_argument("--tokens", type=int, default=8000)
    options = parser.parse_args()
    names = options.families.split(",")
    print_figures({}, {name: measure(name, options.tokens) for name in names})


if __name__ == "__main__":
    main()
