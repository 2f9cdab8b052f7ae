"""The transformers engine on a GPU: `python -m benchmarks.gpu.engine [--device cpu]`.

It samples 64 answers at once, and has the trainer's model score the sampled tokens again, on the
same device and on the CPU. It prints one JSON object of figures, and exits with 1 where log-probs
differ by more than float32 explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.policy import load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.inference.engine import EngineOptions, Sampled, StopTokens
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

from benchmarks.gpu.train_step import EXACT, LARGE, require
from benchmarks.servers.families import make_family

NUM_ROWS, NUM_TOKENS = 64, 128
NUM_SCORED = 8
"""Answers that are scored again; all of them would take the CPU a minute."""

Answer = tuple[list[int], Sampled]


async def sample(directory: Path, *, device: str, num_tokens: int) -> tuple[list[Answer], float]:
    """Return prompts with their samples, and the tokens per second of a second, warm round."""
    options = EngineOptions(max_model_len=512, max_num_seqs=NUM_ROWS, device=device)
    engine = await TransformersEngine.start(directory, options)
    try:
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(engine.vocab_size, (8 + index % 32,), generator=generator).tolist()
            for index in range(NUM_ROWS)
        ]

        async def all_of_them() -> list[Answer]:
            requests = (
                engine.sample(
                    prompt,
                    SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=index),
                    stop=StopTokens(),
                )
                for index, prompt in enumerate(prompts)
            )
            samples = await asyncio.gather(*requests)
            return [(prompt, sampled) for prompt, (sampled,) in zip(prompts, samples, strict=True)]

        await all_of_them()
        started = time.perf_counter()
        answers = await all_of_them()
        return answers, NUM_ROWS * num_tokens / (time.perf_counter() - started)
    finally:
        await engine.close()


@torch.no_grad()
def largest_difference(directory: Path, answers: Sequence[Answer], *, device: str) -> float:
    """Return by how many nats the trainer's log-probs of sampled tokens differ from the engine's.

    Raises AssertionError where the two do not speak of the same number of tokens.
    """
    rows = []
    for prompt, sampled in answers:
        learned = [False] * len(prompt) + [True] * len(sampled.token_ids)
        rows.append(TokenRow.from_demonstration([*prompt, *sampled.token_ids], learned))
    batch = pack_rows(rows)
    policy = load_policy(directory, device=device)
    scored = policy(batch.to(torch.device(device))).logprobs.float().cpu()
    recorded = torch.tensor([value for _, sampled in answers for value in sampled.logprobs])
    assert scored.shape == recorded.shape, (scored.shape, recorded.shape)
    return float((scored - recorded).abs().max())


def figures_of(
    device: str,
    *,
    fields: Mapping[str, Any] = MappingProxyType(LARGE),
    num_tokens: int = NUM_TOKENS,
) -> dict[str, Any]:
    """Return tokens per second and the largest differences; end with 1 where one is too large."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        directory = make_family("qwen3", Path(folder) / "model", fields=fields)
        answers, rate = asyncio.run(sample(directory, device=device, num_tokens=num_tokens))
        some = answers[:NUM_SCORED]
        gaps = {
            f"difference_from_trainer_on_{place}": largest_difference(directory, some, device=place)
            for place in dict.fromkeys((device, "cpu"))
        }
    figures = {"batch": NUM_ROWS, "tokens_per_s": rate, "bound": EXACT, **gaps}
    require(max(gaps.values()) < EXACT, figures)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    sys.stdout.write(json.dumps(figures_of(parser.parse_args().device)) + "\n")
