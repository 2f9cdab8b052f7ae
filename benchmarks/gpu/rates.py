"""vLLM through Dialoop's engine and by itself: `python -m benchmarks.gpu.rates MODEL_DIR`.

It prints tokens per second of both with all requests at once, and by how much a row's log-probs
depend on what else is computed: alone and among others, sampled and scored again. They are equal
under VLLM_BATCH_INVARIANT=1, which exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions, Sampled, StopTokens
from dialoop_services.inference.vllm_engine.environment import Vllm

from benchmarks.gpu.train_step import require
from benchmarks.servers.figures import print_figures

NO_STOP = StopTokens()
PROMPT_TOKENS, ROUNDS = 64, 3
Row = list[int]


def rows_of(vocab_size: int, count: int) -> list[Row]:
    """Return prompts of random ids."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(PROMPT_TOKENS // 2, PROMPT_TOKENS, count)
    return [generator.integers(vocab_size, size=length).tolist() for length in lengths]


async def sample(engine: Any, row: Row, num_tokens: int, seed: int) -> Sampled:
    """Return one sample that nothing but its length ends."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=seed)
    (sampled,) = await engine.sample(row, sampling, stop=NO_STOP)
    return sampled


async def sample_plain(engine: Any, row: Row, num_tokens: int, *, logprobs: bool) -> None:
    """Sample from vLLM's own AsyncLLM."""
    from dialoop_services.inference.vllm_engine.options import vllm_params
    from vllm.inputs.engine import tokens_input

    params = vllm_params(SamplingParams(temperature=1.0), stop=NO_STOP, room=num_tokens)
    if not logprobs:
        params.logprobs = None
    async for last in engine._llm.generate(tokens_input(row), params, uuid.uuid4().hex):
        output = last
    assert len(output.outputs[0].token_ids) == num_tokens


async def rate(ask: Callable[[Row], Awaitable[Any]], rows: Sequence[Row], num_tokens: int) -> float:
    """Return tokens per second of all rows at once."""
    started = time.perf_counter()
    await asyncio.gather(*(ask(row) for row in rows))
    return len(rows) * num_tokens / (time.perf_counter() - started)


async def rates_of(engine: Any, rows: Sequence[Row], num_tokens: int) -> dict[str, float]:
    """Return medians of rounds in which the ways alternate."""
    ways: dict[str, Callable[[Row], Awaitable[Any]]] = {
        "dialoop": lambda row: sample(engine, row, num_tokens, seed=1),
        "plain": lambda row: sample_plain(engine, row, num_tokens, logprobs=False),
        "plain_with_logprobs": lambda row: sample_plain(engine, row, num_tokens, logprobs=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(1 + ROUNDS):
        for name, ask in ways.items():
            value = await rate(ask, rows, num_tokens)
            if round_number:  # the first one warms up
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


async def invariance_of(engine: Any, rows: Sequence[Row], num_tokens: int) -> dict[str, float]:
    """Return how far the first row's numbers are apart alone and among the others, in nats.

    equal_tokens: how many tokens of one seed agree until the first that differs.
    """
    first, others = rows[0], rows[1:]
    alone = await sample(engine, first, num_tokens, seed=7)
    among, *_ = await asyncio.gather(
        sample(engine, first, num_tokens, seed=7),
        *(sample(engine, row, num_tokens, seed=i) for i, row in enumerate(others)),
    )
    pairs = zip(alone.token_ids, among.token_ids, strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), num_tokens)
    row = [*first, *alone.token_ids]
    scored = (await engine.logprobs(row)).logprobs
    scored_among, *_ = await asyncio.gather(*(engine.logprobs(each) for each in (row, *others)))
    behind = len(first) - 1
    return {
        "equal_tokens": equal,
        "sampled_alone_or_among": _largest(alone.logprobs[:equal], among.logprobs[:equal]),
        "scored_alone_or_among": _largest(scored, scored_among.logprobs),
        "sampled_or_scored": _largest(alone.logprobs, scored[behind:]),
    }


def _largest(values: Any, others: Any) -> float:
    return float(np.abs(np.asarray(values) - np.asarray(others)).max(initial=0.0))


async def figures_of(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and measure."""
    started = time.perf_counter()
    engine: Any = await Vllm.start(
        model,
        EngineOptions(
            max_model_len=PROMPT_TOKENS + 2 * options.new_tokens,
            max_num_seqs=options.requests,
            dtype=options.dtype,
            kv_cache_bytes=options.kv_cache_mib << 20,
        ),
    )
    start_s = time.perf_counter() - started
    try:
        rows = rows_of(engine.vocab_size, options.requests)
        return {
            "start_s": start_s,
            "requests": options.requests,
            "new_tokens": options.new_tokens,
            "tokens_per_s": await rates_of(engine, rows, options.new_tokens),
            "one_request_tokens_per_s": await rate(
                lambda row: sample(engine, row, options.new_tokens, seed=1),
                rows[:1],
                options.new_tokens,
            ),
            "nats": await invariance_of(engine, rows[:64], options.new_tokens),
        }
    finally:
        await engine.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--kv-cache-mib", type=int, default=4096)
    options = parser.parse_args()
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    figures = asyncio.run(figures_of(options.model, options))
    figures |= {"batch_invariant": is_invariant}
    apart = [figures["nats"][f"{way}_alone_or_among"] for way in ("sampled", "scored")]
    require(not is_invariant or max(apart) == 0.0, figures)
    facts = {name: figures.pop(name) for name in ("start_s", "requests", "new_tokens")}
    print_figures(facts, figures, indent=None)


if __name__ == "__main__":
    main()
