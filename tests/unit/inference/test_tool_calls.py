"""What a policy wrote, read back: calls are exact, and what is told early is never taken back."""

from __future__ import annotations

import json

import pytest
from dialoop.chat import Message, ToolCall
from dialoop_services.inference.recordings.matching import is_same
from dialoop_services.inference.wires.reading import AnswerSyntax, WrittenCall
from hypothesis import given
from hypothesis import strategies as st

CALLS = AnswerSyntax(reads_calls=True, reads_reasoning=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1.10}}\n</tool_call>'
PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "\n",
    "text",
    "<think>",
    "</think>",
    "<",
    "é",
]


def test_arguments_keep_their_spelling():
    assert CALLS.read(CALL).calls == (WrittenCall(name="f", arguments_json='{"a": 1.10}'),)


@pytest.mark.parametrize("content", ["", "text", "line\n", "\n", "two\n\nlines\n\n"])
def test_one_line_end_before_a_call_is_the_syntaxs_own(content):
    reading = CALLS.read((f"{content}\n" if content else "") + CALL + "\n" + CALL)
    assert (reading.content, len(reading.calls)) == (content, 2)


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_content(body):
    text = f"<tool_call>{body}</tool_call>"
    reading = CALLS.read(text)
    assert (reading.content, reading.calls) == (text, ())


def test_reasoning_is_parted_from_content():
    reading = CALLS.read("<think>\nhm\n</think>\n\nSeven.")
    assert (reading.reasoning, reading.content) == ("hm", "Seven.")
    opened = AnswerSyntax(reads_reasoning=True, starts_in_reasoning=True)
    assert opened.read("hm\n</think>\n\nSeven.") == reading
    assert AnswerSyntax().read("<think>x</think>").content == "<think>x</think>"


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join), st.booleans())
def test_what_is_told_early_is_never_taken_back(text, starts):
    syntax = AnswerSyntax(reads_calls=True, reads_reasoning=True, starts_in_reasoning=starts)
    last = syntax.read(text)
    for length in range(len(text)):
        early = syntax.read(text[:length], is_over=False)
        assert last.content.startswith(early.content)
        assert last.reasoning.startswith(early.reasoning)
        assert last.calls[: len(early.calls)] == early.calls


def message(text: str = "", arguments: dict | None = None, call_id: str = "c") -> Message:
    calls = ()
    if arguments is not None:
        calls = (ToolCall(id=call_id, name="f", arguments_json=json.dumps(arguments)),)
    return Message(role="assistant", content=text, tool_calls=calls)


def test_a_message_is_known_in_another_spelling():
    assert is_same(message("x ", {"a": 1, "b": 2}), message("", {"b": 2, "a": 1}))
    assert not is_same(message("x", {"a": 1}), message("y", {"a": 1}))
    assert not is_same(message("", {"a": 1}), message("", {"a": 2}))
    assert not is_same(message("", {"a": 1}), message("", {"a": 1}, call_id="d"))
    assert not is_same(message("x"), message("x "))
    assert not is_same(message("x"), message("x", {"a": 1}))
