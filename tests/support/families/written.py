"""Calls as the published templates of each family write them, and a tokenizer with the marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from dialoop.answers import GRAMMARS
from dialoop.tokens.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

Call = tuple[str, Mapping[str, Any]]
THINK = ("<think>", "</think>")


def byte_vocabulary(marks: Sequence[str], ends: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a byte-level vocabulary in which each mark, and each end of a turn, is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(ends))
    added = [mark for mark in dict.fromkeys(marks) if mark not in ends]
    made.add_tokens([AddedToken(mark, normalized=False) for mark in added])
    return made


def byte_tokenizer(
    marks: Sequence[str] = (), *, ends: Sequence[str] = ("<|im_end|>",)
) -> Tokenizer:
    """Return the tokenizer of such a vocabulary."""
    made = byte_vocabulary(marks, ends)
    config = {"eos_token_ids": [made.token_to_id(end) for end in ends]}
    text = made.to_str()
    return Tokenizer(
        tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text), config
    )


def marks_of(grammar: str) -> tuple[str, ...]:
    """Return the marks that the family's tokenizers have as tokens, and those of a thought."""
    return (*(mark for mark in GRAMMARS[grammar].marks if "`" not in mark), *THINK)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, '
        f'"arguments": {_text(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _xml(calls: Sequence[Call]) -> str:
    parts = []
    for name, arguments in calls:
        rows = (f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
        parts.append(f"\n<tool_call>\n<function={name}>\n{''.join(rows)}</function>\n</tool_call>")
    return "".join(parts)


def _arg_key(calls: Sequence[Call]) -> str:
    parts = []
    for name, arguments in calls:
        rows = (
            f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        parts.append(f"\n<tool_call>{name}\n{''.join(rows)}</tool_call>")
    return "".join(parts)


def _wide(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


def _deepseek(calls: Sequence[Call], *, fenced: bool) -> str:
    parts = []
    for name, arguments in calls:
        body = f"{name}{_wide('sep')}{_text(arguments)}"
        if fenced:
            body = f"function{_wide('sep')}{name}\n```json\n{_text(arguments)}\n```"
        parts.append(f"{_wide('call▁begin')}{body}{_wide('call▁end')}")
    between = "\n" if fenced else ""
    return f"{_wide('calls▁begin')}{between.join(parts)}{_wide('calls▁end')}"


def _kimi(calls: Sequence[Call]) -> str:
    rows = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{_text(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{rows}<|tool_calls_section_end|>"


def _llama(calls: Sequence[Call]) -> str:
    rows = (
        f'{{"name": {json.dumps(name)}, "parameters": {_text(arguments)}}}'
        for name, arguments in calls
    )
    return "\n" + "; ".join(rows)


def _python_calls(calls: Sequence[Call]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        for name, arguments in calls
    )


def _bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(v, quote) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_bare(v, quote)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _gemma4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{n}{_bare(dict(a), quote)}<tool_call|>" for n, a in calls)


def _function_gemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<start_function_call>call:{n}{_bare(dict(a), '<escape>')}<end_function_call>"
        for n, a in calls
    )


def harmony(calls: Sequence[Call], *, content: str = "", thought: str = "") -> str:
    """Return a whole answer of gpt-oss, which is all channels; calls end it."""
    parts = []
    if thought:
        parts.append(f"<|channel|>analysis<|message|>{thought}<|end|>")
    if content:
        parts.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}<|end|>")
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_text(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(parts)


def _mistral(calls: Sequence[Call]) -> str:
    rows = [{"name": name, "arguments": arguments, "id": "a1b2c3d4e"} for name, arguments in calls]
    return f"[TOOL_CALLS]{_text(rows)}"


WRITERS: Mapping[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", _hermes),
    "xml": ("xml", _xml),
    "arg_key": ("arg_key", _arg_key),
    "deepseek_v3": ("deepseek", lambda calls: _deepseek(calls, fenced=True)),
    "deepseek_v31": ("deepseek", lambda calls: _deepseek(calls, fenced=False)),
    "kimi": ("kimi", _kimi),
    "json": ("json", _llama),
    "python_tag": ("json", lambda calls: "<|python_tag|>" + _llama(calls).lstrip("\n")),
    "pythonic": ("pythonic", lambda calls: f"\n[{_python_calls(calls)}]"),
    "llama4": ("pythonic", lambda calls: f"<|python_start|>[{_python_calls(calls)}]<|python_end|>"),
    "mistral": ("mistral", _mistral),
    "lfm2": (
        "pythonic",
        lambda calls: f"\n<|tool_call_start|>[{_python_calls(calls)}]<|tool_call_end|>",
    ),
    "tool_code": ("gemma", lambda calls: f"\n```tool_code\n[{_python_calls(calls)}]\n```"),
    "gemma4": ("gemma", _gemma4),
    "function_gemma": ("gemma", _function_gemma),
}
"""Writer by way of writing, with the name of its grammar; a line end of the template's is in it."""
