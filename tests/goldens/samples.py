"""The tokenizer and the hand-written conversations of the golden files; needs no torch."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
)
_MERGES = "e r|u s|us er|a s|s i|as si|s t|assi st|a n|an t|assist ant|h e|he l|l o|hel lo|Ċ Ċ|Ġ Ġ"

# The users' document, seed 001 lines 130-166.
LLAMA = """
{% for message in messages %}
{%- if message['role'] == 'user' %}
{{ '<s>[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
{% generation %}{{ ' ' }}{% endgeneration %}
{%- endif %}
"""

SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}


def golden_tokenizer() -> Tokenizer:
    """Byte-level BPE of 256 bytes, some merges, and the special tokens of every named template."""
    merges = [tuple(merge.split(" ")) for merge in _MERGES.split("|")]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _messages(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


_ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 35, "b": [4.5, "ä"]}}}
_NOW = {"type": "function", "function": {"name": "now", "arguments": {}}}
_ASKED = {"role": "user", "content": "35+40?"}
_SYSTEM = {"role": "system", "content": "You use tools."}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one_turn": _messages(("user", "hello"), ("assistant", "Hi there!")),
    "system": _messages(("system", "Be brief."), ("user", "hello"), ("assistant", "Hi")),
    "two_turns": _messages(
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "Hi"),
        ("user", "And now?"),
        ("assistant", "Now\n\nwe part."),
    ),
    "question": _messages(("system", "Be brief."), ("user", "hello")),
    "system_later": _messages(("user", "hello"), ("system", "Be brief."), ("assistant", "Hi")),
    "assistant_first": _messages(("assistant", "Hi, I am here."), ("user", "hello")),
    "quoted": _messages(
        ("user", "say ab"), ("assistant", "ab"), ("user", "ab?"), ("assistant", "b")
    ),
    "empty_question": _messages(("user", ""), ("assistant", "What?")),
    "empty_answer": _messages(("user", "hello"), ("assistant", ""), ("user", "well?")),
    "whitespace": _messages(
        ("user", "  hello \n"), ("assistant", "\n\nHi \t\n"), ("user", "\n"), ("assistant", " ")
    ),
    "unicode": _messages(
        ("user", "né 世界 🙂 ok"), ("assistant", "größer ≥ 世 🙂 fin"), ("user", "é")
    ),
    "ends_in_bytes": _messages(("user", "smile"), ("assistant", "ok 🙂"), ("user", "世")),
    "tool": _messages(
        ("user", "1+2"), ("assistant", "Let me see."), ("tool", "3"), ("assistant", "3")
    ),
    "two_tools": _messages(
        ("system", "Be brief."),
        ("user", "1+2, 3+4"),
        ("assistant", "Both."),
        ("tool", "3"),
        ("tool", " 7\n"),
        ("assistant", "3 and 7"),
    ),
    "call": [_SYSTEM, _ASKED, {"role": "assistant", "content": "", "tool_calls": [_ADD]}],
    "called": [
        _SYSTEM,
        _ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [_ADD, _NOW]},
        {"role": "tool", "content": "75"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "75, at noon"},
    ],
    "responses": [_SYSTEM, _ASKED, {"role": "tool", "content": "", "tool_responses": ["7", "8"]}],
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add <two> numbers & más",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
