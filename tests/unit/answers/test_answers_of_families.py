"""Random calls in each family's own text are read back, whole and in a stream of any cut."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from dialoop.answers import GRAMMARS, AnswerForm, AnswerReader, Reading, read_text
from dialoop.chat import ToolDefinition
from dialoop.tokens.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families.written import THINK, WRITERS, byte_tokenizer, harmony, marks_of

_PIECES = [
    "a",
    "é",
    "世",
    " ",
    "\n",
    "</tool_call>",
    '"',
    "\\",
    "{",
    "}",
    "'",
    "[",
    "</parameter>.",
]
TEXTS = st.lists(st.sampled_from([*_PIECES, "```", "<", "\t", "5"]), max_size=6).map("".join)
CONTENTS = st.lists(st.sampled_from(["So", "é", "\n", "<", "tool", " "]), max_size=5).map("".join)
NAMES = st.from_regex(r"[a-zé][a-zé_0-9]{0,5}", fullmatch=True)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    TEXTS,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(NAMES, SCALARS, max_size=2)
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def tools_of(calls) -> list[ToolDefinition]:
    """Return tools whose arguments have the types of these."""
    return [
        ToolDefinition(
            name=name,
            parameters_json=json.dumps(
                {
                    "properties": {
                        key: {
                            "type": _TYPES.get(type(value))
                            or ["object", "array"][type(value) is list]
                        }
                        for key, value in arguments.items()
                    }
                }
            ),
        )
        for name, arguments in calls
    ]


@cache
def tokenizer_of(grammar: str, *, has_marks: bool) -> Tokenizer:
    return byte_tokenizer(marks_of(grammar) if has_marks else ())


def streamed(form: AnswerForm, tokenizer: Tokenizer, ids, tools=(), size: int = 1) -> Reading:
    """Read token by token; what is given out never changes."""
    reader, last = AnswerReader(form, tokenizer, tools), Reading()
    taken = Reading()
    for start in range(0, len(ids), size):
        reader.add(ids[start : start + size])
        early, new = reader.reading, reader.take()
        assert early.content.startswith(last.content)
        assert early.reasoning.startswith(last.reasoning)
        assert early.calls[: len(last.calls)] == last.calls
        taken = Reading(
            content=taken.content + new.content,
            reasoning=taken.reasoning + new.reasoning,
            calls=taken.calls + new.calls,
        )
        assert taken == early
        last = early
    whole = reader.finish()
    assert whole.content.startswith(last.content)
    assert whole.calls[: len(last.calls)] == last.calls
    return whole


def asked(reading: Reading) -> list[tuple[str, Any]]:
    assert not any(call.problem for call in reading.calls), reading
    return [(call.name, json.loads(call.arguments_json)) for call in reading.calls]


@pytest.mark.parametrize("way", WRITERS)
@settings(max_examples=60, deadline=None)
@given(CALLS, CONTENTS, CONTENTS, TEXTS, st.integers(1, 9))
def test_calls_are_read_back(way, calls, before, after, thought, size):
    name, write = WRITERS[way]
    written, tools = write(calls), tools_of(calls)
    inner = written if "</think>" not in written else ""
    thought = f"{thought}{inner}".strip("\n")
    before, after = before.strip("\n"), after.lstrip()
    text = f"<think>\n{thought}\n</think>\n\n{before}"
    text += (written if before else written.lstrip("\n")) + after
    form = AnswerForm(reasoning=THINK, calls=name)
    whole = read_text(text, form, tools)
    assert asked(whole) == [(name, dict(arguments)) for name, arguments in calls]
    assert (whole.content, whole.reasoning) == (before + after, thought)
    for has_marks in (True, False):
        tokenizer = tokenizer_of(name, has_marks=has_marks)
        ids = tokenizer.encode(text, trusted=True).ids
        assert streamed(form, tokenizer, ids, tools, size) == whole


@settings(max_examples=60, deadline=None)
@given(CALLS, CONTENTS, TEXTS, st.integers(1, 9))
def test_channels_are_read_back(calls, content, thought, size):
    thought = thought.strip("\n")
    text = harmony(calls, content=content, thought=thought)
    form = AnswerForm(reasoning=("<|channel|>analysis<|message|>", "<|end|>"), calls="harmony")
    whole = read_text(text, form)
    assert asked(whole) == [(name, dict(arguments)) for name, arguments in calls]
    assert (whole.content, whole.reasoning) == (content, thought)
    for has_marks in (True, False):
        tokenizer = tokenizer_of("harmony", has_marks=has_marks)
        ids = tokenizer.encode(text, trusted=True).ids
        assert streamed(form, tokenizer, ids, size=size) == whole


_JUNK = ["\n", "text", '"', "{", "}", "[", "]", "\\", "f(", "a=1", ")", "é", ": ", ", ", "'", "```"]
_JUNK += ['{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', "<function=f>"]
_JUNK += [
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "functions.f:0",
    "call:f{",
    "to=functions.f",
]


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_stream_of_anything_ends_as_the_whole(name, data):
    pieces = [*_JUNK, *GRAMMARS[name].marks, *THINK, *(mark[:4] for mark in GRAMMARS[name].marks)]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    form = AnswerForm(
        reasoning=THINK if name != "harmony" else None,
        calls=name,
        starts_in_reasoning=data.draw(st.booleans()),
    )
    whole, size = read_text(text, form), data.draw(st.integers(1, 5))
    for has_marks in (True, False):
        tokenizer = tokenizer_of(name, has_marks=has_marks)
        assert (
            streamed(form, tokenizer, tokenizer.encode(text, trusted=True).ids, size=size) == whole
        )
    if not whole.calls and not whole.reasoning and name != "harmony":
        assert text.endswith(whole.content)
