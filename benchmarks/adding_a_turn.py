"""Measure adding one turn to a long conversation, beside rendering and tokenising it all again.

python -m benchmarks.adding_a_turn --turns 20 --repeats 200

Ours is what an inference replica does for a turn: check that the tokens still stand, render,
tokenise what was added, and put the answer's tokens after it. Theirs is transformers'
apply_chat_template on the whole conversation. `forgotten` is ours where another replica built the
tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from dialoop.chat import History, Message
from dialoop.sequences import ForkCause, PolicyVersion, Sequence
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.servers.figures import print_figures
from tests.support.samples.chat_families import FAMILIES

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VERSION = PolicyVersion(lineage="main", number=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=40, help="words of a message")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    corpus = _corpus()
    engine = _tokenizer(corpus)
    figures = {
        name: _measure(engine, FAMILIES[name], corpus, options)
        for name in ("chatml", "thinking", "trimming")
    }
    facts = {
        "benchmark": "adding_a_turn",
        "num_turns": options.turns,
        "words_per_message": options.words,
        "vocab_size": engine.get_vocab_size(),
        "cpu_cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    print_figures(facts, {"templates": figures})


def _corpus() -> list[str]:
    """Words to speak and to learn a vocabulary from: Python's own sources."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return " ".join(path.read_text("utf-8") for path in paths).split()


def _tokenizer(corpus: list[str]) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(
        (" ".join(corpus[i : i + 64]) for i in range(0, len(corpus), 64)), trainer
    )
    return engine


def _measure(
    engine: tokenizers.Tokenizer, template: str, corpus: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    tokenizer = Tokenizer(engine, tokenizers.Tokenizer.from_str(engine.to_str()), config)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    theirs = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|im_end|>")
    chance = random.Random(0)

    def message(role: str) -> Message:
        start = chance.randrange(len(corpus) - options.words)
        return Message(role=role, content=" ".join(corpus[start : start + options.words]))

    history, context = History((message("user"),)), None
    for turn in range(options.turns):
        context, history = _answer(builder, history, context, message("assistant").text, turn)
        history = history.append(message("user" if turn % 3 else "tool"))
    assert context is not None
    chats = history.to_chats()
    answer = tokenizer.encode("yes").ids

    def ours() -> Sequence:
        prompt = builder.prompt(
            history, context=context, num_context_messages=len(history) - 1, turn=options.turns
        )
        assert prompt.fork_cause is ForkCause.NONE
        builder.answer(prompt, answer, versions=[(len(answer), VERSION)])
        return prompt.sequence

    def forgotten() -> Sequence:
        builder.forget()
        return ours()

    def again() -> list[int]:
        ids: list[int] = theirs.apply_chat_template(
            chats, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        return ids

    assert len(ours()) >= len(again())
    times = _times({"ours": ours, "forgotten": forgotten, "again": again}, options.repeats)
    return {
        "num_tokens": len(ours()),
        "num_tokens_again": len(again()),
        **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in times.items()},
        "times_faster": round(times["again"] / times["ours"], 2),
        "times_faster_forgotten": round(times["again"] / times["forgotten"], 2),
    }


def _answer(
    builder: TokenBuilder, history: History, context: Sequence | None, text: str, turn: int
) -> tuple[Sequence, History]:
    covered = 0 if context is None else len(history) - 1
    prompt = builder.prompt(history, context=context, num_context_messages=covered, turn=turn)
    ids = [*builder.tokenizer.encode(text).ids, *builder.tokenizer.end_of_turn_ids]
    answer = builder.answer(prompt, ids, versions=[(len(ids), VERSION)])
    whole = answer.appended if context is None else context.extended_by(answer.appended)
    return whole, history.append(answer.message)


def _times(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, so that a busy moment is busy for all."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            started = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


if __name__ == "__main__":
    main()
