"""Measure what it costs to read a token of an answer while a call streams, by grammar.

python -m benchmarks.answers --tokens 1000 20000

The call writes one long text. The cost is that of the last part of the call: it is flat where the
figures of short and long calls are alike. Most of it is the tokenizer's, which `decoding` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from dialoop.answers import GRAMMARS, AnswerForm, AnswerReader
from dialoop.tokens.tokenizer import RunningText, Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from benchmarks.servers.figures import print_figures

_WINDOW = 500
_WIDE = "<\uff5ctool\u2581{}\uff5c>"
_BEGINNINGS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"text": "',
    "xml": "<tool_call>\n<function=f>\n<parameter=text>\n",
    "arg_key": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>",
    "deepseek": _WIDE.format("call▁begin") + "f" + _WIDE.format("sep") + '{"text": "',
    "kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"text": "',
    "json": '{"name": "f", "parameters": {"text": "',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"text": "',
    "pythonic": '[f(text="',
    "gemma": '<|tool_call>call:f{text:<|"|>',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"text": "',
}


def _tokenizer(marks: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE of 4,096 ids on Python's own sources, and add the marks."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    text = made.to_str()
    return Tokenizer(tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text), {})


def _took_us(add: Callable[[list[int]], Any], ids: Sequence[int]) -> float:
    """Return the median microseconds of one of the last tokens."""
    took = []
    for token in ids:
        started = time.perf_counter()
        add([token])
        took.append(time.perf_counter() - started)
    return round(statistics.median(took[-_WINDOW:]) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 20_000])
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    marks = dict.fromkeys(mark for grammar in GRAMMARS.values() for mark in grammar.marks)
    tokenizer = _tokenizer([mark for mark in marks if "`" not in mark])
    words = json.dumps(Path(os.__file__).read_text("utf-8") * 8)[1:-1].replace('\\"', "")
    figures: dict[str, dict[str, float]] = {"decoding": {}}
    for name, beginning in _BEGINNINGS.items():
        figures[name] = {}
        for num in arguments.tokens:
            ids = tokenizer.encode(beginning + words, trusted=True).ids[:num]
            assert len(ids) == num, "the text is too short"
            reader = AnswerReader(AnswerForm(calls=name), tokenizer)
            figures[name][str(num)] = _took_us(reader.add, ids)
            figures["decoding"][str(num)] = _took_us(RunningText(tokenizer).add, ids)
            assert not reader.reading.content, "the text is in the call"
    facts = {"benchmark": "answers", "cores": os.cpu_count(), "load_before": round(load, 2)}
    print_figures(facts, {"median_us_a_token": figures})


if __name__ == "__main__":
    main()
