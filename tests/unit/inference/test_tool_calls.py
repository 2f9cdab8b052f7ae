"""Calls as a policy's template writes them, read back; messages known in another spelling."""

from __future__ import annotations

import json

import pytest
from dialoop.answers import AnswerForm, WrittenCall, read_text
from dialoop.chat import Message, ToolCall
from dialoop_services.inference.recordings.matching import is_same

CALLS = AnswerForm(reasoning=("<think>", "</think>"), calls="hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1.10}}\n</tool_call>'


def test_arguments_keep_their_spelling():
    assert read_text(CALL, CALLS).calls == (WrittenCall(name="f", arguments_json='{"a": 1.10}'),)


@pytest.mark.parametrize("content", ["", "text", "line\n", "\n", "two\n\nlines\n\n"])
def test_one_line_end_before_a_call_is_the_syntaxs_own(content):
    reading = read_text((f"{content}\n" if content else "") + CALL + "\n" + CALL, CALLS)
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
    reading = read_text(text, CALLS)
    assert (reading.content, [c for c in reading.calls if not c.problem]) == (text, [])


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
