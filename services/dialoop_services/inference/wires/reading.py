r"""The text of a policy as a client reads it: reasoning, content and tool calls.

    syntax = AnswerSyntax(reads_calls=True)
    syntax.read('Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    # Reading(content="Let me see.", calls=(WrittenCall(name="f", arguments_json='{"a": 1}'),))

The syntax is that of Hermes and Qwen. Text that does not parse as a call stays content,
unchanged.
"""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.chat import ToolCall

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_services.inference.engine import Sampled

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_THINK_START, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as it was written; `arguments_json` is an object."""

    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An answer, or the part of a running one that will not change any more."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[WrittenCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """What to look for: calls only where tools were offered, reasoning where the template has it.

    starts_in_reasoning: the prompt has opened the reasoning already.
    """

    reads_calls: bool = False
    reads_reasoning: bool = False
    starts_in_reasoning: bool = False

    def read(self, text: str, *, is_over: bool = True) -> Reading:
        """Return the parts of the text; of a running answer those that will not change any more."""
        reasoning, rest = self._split(text, is_over=is_over)
        if not self.reads_calls:
            return Reading(reasoning=reasoning, content=rest)
        content, calls = _without_calls(rest, is_over=is_over)
        return Reading(reasoning=reasoning, content=content, calls=calls)

    def _split(self, text: str, *, is_over: bool) -> tuple[str, str]:
        """Return the reasoning and the rest, without the line ends around the marks."""
        if self.starts_in_reasoning:
            thought = text
        elif self.reads_reasoning and text.startswith(_THINK_START):
            thought = text[len(_THINK_START) :]
        elif self.reads_reasoning and not is_over and _THINK_START.startswith(text):
            return "", ""
        else:
            return "", text
        reasoning, end, rest = thought.partition(_THINK_END)
        if not end and not is_over:
            reasoning = reasoning[: len(reasoning) - held_back(reasoning, _THINK_END)]
        return reasoning.strip("\n"), rest.lstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How answers are read: their syntax, and the stop strings that are cut off."""

    tokenizer: Tokenizer
    syntax: AnswerSyntax
    cut: tuple[str, ...] = ()

    def text_of(self, sampled: Sampled) -> str:
        """Return the text of a finished answer, without the end of turn and the stop string."""
        ids = sampled.token_ids
        ends = bool(ids) and ids[-1] in self.tokenizer.end_of_turn_ids
        text = self.tokenizer.decode(ids[:-1] if ends else ids)
        if sampled.stop_string in self.cut:
            return text.partition(sampled.stop_string)[0]
        return text


class CallIds:
    """The ids of an answer's tool calls; no id is used twice anywhere."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def calls(self, reading: Reading) -> tuple[ToolCall, ...]:
        """Return the calls of a reading; a later reading of the same answer keeps the ids."""
        while len(self._ids) < len(reading.calls):
            self._ids.append(f"call_{uuid.uuid4().hex}")
        return tuple(
            ToolCall(id=call_id, name=call.name, arguments_json=call.arguments_json)
            for call_id, call in zip(self._ids, reading.calls, strict=False)
        )


def held_back(text: str, *marks: str) -> int:
    """Return how many of the last characters may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(text), len(mark) - 1), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def _without_calls(text: str, *, is_over: bool) -> tuple[str, tuple[WrittenCall, ...]]:
    """Return the text outside of calls, and the calls. The line end before a call is dropped."""
    content: list[str] = []
    calls: list[WrittenCall] = []
    while True:
        before, start, after = text.partition(CALL_START)
        body, end, rest = after.partition(CALL_END)
        if not end:
            break
        call = _call(body)
        if call is None:
            content.append(before + start + body + end)
        else:
            content.append(before.removesuffix("\n"))
            calls.append(call)
        text = rest
    if is_over:
        return "".join((*content, text)), tuple(calls)
    if start:
        safe = before.removesuffix("\n")
    else:
        safe = text[: len(text) - held_back(text, "\n" + CALL_START, CALL_START)]
    return "".join((*content, safe)), tuple(calls)


def _call(body: str) -> WrittenCall | None:
    """Return the call that a body spells; None when it is not a call."""
    try:
        call = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return WrittenCall(name=name, arguments_json=_as_written(body.strip(), name, arguments))


def _as_written(body: str, name: str, arguments: dict[str, Any]) -> str:
    """Return the arguments as the policy wrote them, where the call is written as templates do."""
    start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    if body.startswith(start):
        return body[len(start) : -1].rstrip()
    return json.dumps(arguments, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("too large a number")
    return value
