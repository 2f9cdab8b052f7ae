"""Measure a conversation as token ids and assistant mask: ours, transformers' and torchrl's.

python -m benchmarks.rendering --calls 500

All three render the same qwen template with the same tokenizer in one process and give the same ids
and mask; they are called in turns, so that what else runs slows all of them. torchrl is measured
where it can be imported: in an environment with torchrl 0.14, transformers and this package.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from dialoop.chat import History
from dialoop.templates.registry import named_template
from dialoop.tokens.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.servers.figures import print_figures

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE of 8,192 ids on Python's own sources, to download nothing."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:80]]
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def _conversation(num_turns: int, num_words: int) -> list[dict[str, str]]:
    generator = random.Random(0)
    words = (Path(os.__file__).read_text("utf-8")).split()

    def text() -> str:
        return " ".join(generator.choices(words, k=num_words))

    chats = [{"role": "system", "content": text()}]
    for _ in range(num_turns):
        chats += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return chats


def _ways(chats: list[dict[str, str]], made: tokenizers.Tokenizer) -> dict[str, Callable[[], Any]]:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    ours = Tokenizer.from_transformers(theirs)
    history = History.from_chats(chats)
    source = named_template("qwen").source
    masked = {"add_generation_prompt": False, "return_assistant_tokens_mask": True}
    ways: dict[str, Callable[[], Any]] = {
        "dialoop": lambda: history.apply_chat_template(ours, chat_template_name="qwen", **masked),
        "transformers": lambda: theirs.apply_chat_template(
            chats, chat_template=source, return_dict=True, **masked
        ),
    }
    try:
        from torchrl.data.llm import History as TheirHistory
    except ImportError:
        return ways
    their_history = TheirHistory.from_chats(chats)
    ways["torchrl"] = lambda: their_history.apply_chat_template(
        tokenizer=theirs, chat_template_name="qwen", **masked
    )
    return ways


def _row(encoded: Any, key: str) -> list[int]:
    values = encoded[key]
    return [int(v) for v in (values.flatten() if hasattr(values, "flatten") else values)]


def _took_ms(way: Callable[[], Any]) -> float:
    started = time.perf_counter()
    way()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    chats = _conversation(arguments.turns, arguments.words)
    ways = _ways(chats, _tokenizer())
    by_way = {name: way() for name, way in ways.items()}
    for key in ("input_ids", "assistant_masks"):
        assert len({tuple(_row(encoded, key)) for encoded in by_way.values()}) == 1, key
    took = {name: [0.0] * arguments.calls for name in ways}
    for call in range(arguments.calls):
        for name, way in ways.items():
            took[name][call] = _took_ms(way)
    figures = {
        "median_ms": {name: statistics.median(times) for name, times in took.items()},
        "best_ms": {name: min(times) for name, times in took.items()},
    }
    result = {
        "benchmark": "rendering",
        "messages": len(chats),
        "tokens": len(_row(by_way["dialoop"], "input_ids")),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "calls": arguments.calls,
        "torchrl": "run" if "torchrl" in ways else "not run: not installed here",
        "times_faster_than": {
            name: {f: round(times[name] / times["dialoop"], 2) for f, times in figures.items()}
            for name in ways
            if name != "dialoop"
        },
    }
    rounded = {
        figure: {name: round(ms, 3) for name, ms in times.items()}
        for figure, times in figures.items()
    }
    print_figures(result, rounded)


if __name__ == "__main__":
    main()
