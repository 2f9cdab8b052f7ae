"""Answers that mean harm: nothing raises, nothing is lost, and time grows with the length alone."""

from __future__ import annotations

import json
import random
import time

import pytest
from dialoop.answers import GRAMMARS, AnswerForm, AnswerReader, Reading, read_text

from tests.support.families.written import THINK, byte_tokenizer, marks_of

BODIES = [
    "[" * 1_000,
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}",
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": null, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": ["f"], "arguments": {}}',
    '{"name": "f", "arguments": {}',
    '{"name": "f" "arguments": {}}',
    '{"name": "f", "arguments": {},}',
    "\ud800",
    "",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40].encode(errors="replace").hex())
def test_what_is_no_call_stays_content_and_has_a_problem(body):
    text = f"<tool_call>{body}</tool_call>"
    reading = read_text(text, AnswerForm(calls="hermes"))
    assert reading.content == text
    assert [bool(call.problem) for call in reading.calls] == [True]


def test_the_last_of_two_keys_counts_and_its_spelling_is_json():
    body = '{"name": "f", "arguments": {"a": 1}, "arguments": {"b":2, "b":3}, "name": "g"}'
    (call,) = read_text(f"<tool_call>{body}</tool_call>", AnswerForm(calls="hermes")).calls
    assert (call.name, call.arguments_json) == ("g", '{"b":2, "b":3}')


@pytest.mark.parametrize("grammar", ["xml", "arg_key", "pythonic", "gemma", "json"])
def test_lone_surrogates_never_leave_as_such(grammar):
    value = "a\udc80\ud800b"
    text = {
        "xml": f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>",
        "arg_key": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "pythonic": "[f(a='a\\udc80\\ud800b')]",
        "gemma": f'<|tool_call>call:f{{a:<|"|>{value}<|"|>}}<tool_call|>',
        "json": '{"name": "f", "parameters": {"a": "a\\udc80\\ud800b"}}',
    }[grammar]
    (call,) = read_text(text, AnswerForm(calls=grammar)).calls
    call.arguments_json.encode()
    assert json.loads(call.arguments_json) == {"a": "a\udc80\ud800b"}


ONES = [
    '<tool_call>{"',
    '<tool_call>{"</tool_call>',
    '<tool_call>{"a</tool_call>',
    '<tool_call>{":</tool_call>',
    '<tool_call>{",</tool_call>',
    '<tool_call>{",":</tool_call>',
    "<tool_call>\\",
    "<tool_call><function=f><parameter=a></tool_call>",
    "<tool_call><function=f><parameter=a></parameter>",
    "<tool_call><function=f><parameter=a></parameter>                  </tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call>",
    "<tool_call>f<arg_value>",
    '\n{"name": ',
    '\n{"name": {',
    '\n{"name": "',
    '\n{"name": "f", "parameters": {}}',
    "\n[f(",
    "\n[f(a='",
    "[f(a=",
    "f(a=[",
    "not ",
    "-",
    "\n```tool_code\n",
    "\n```tool_code\n'",
    "```",
    '<|tool_call>call:f{a:<|"|>',
    "<|tool_call>call:f{a:{",
    "<start_function_call>call:f{a:<escape><end_function_call>",
    "<|channel|>commentary to=functions.f<|message|>",
    '<|channel|>commentary to=functions.f<|message|>{"',
    "<|start|>",
    "<|start|>assistant to=",
    "<|message|>",
    "<think>",
    "\n",
    " ",
    "\\",
    '"',
]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_time_grows_with_the_length_of_an_answer_alone(grammar):
    """A reader that looks at the rest anew for each call would take minutes."""
    form = AnswerForm(calls=grammar, reasoning=None if grammar == "harmony" else THINK)
    for one in (*ONES, *GRAMMARS[grammar].marks):
        text = one * (200_000 // len(one))
        started = time.process_time()
        reading = read_text(text, form)
        assert time.process_time() - started < 10, one
        assert reading.content or reading.reasoning or reading.calls


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_megabyte_of_junk_is_read(grammar):
    chance = random.Random(grammar)
    pieces = [*ONES, *GRAMMARS[grammar].marks, *'{}[]",:\n']
    text = "".join(chance.choices(pieces, k=80_000))[:1_000_000]
    started = time.process_time()
    read_text(text, AnswerForm(calls=grammar))
    assert time.process_time() - started < 15


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_junk_loses_nothing(grammar):
    """Without calls and thoughts the content is the text; a stream of it takes no longer."""
    chance = random.Random(grammar)
    pieces = [*ONES, *GRAMMARS[grammar].marks, *'{}[]",:\n']
    text = "".join(chance.choices(pieces, k=2_000))
    form, tokenizer = AnswerForm(calls=grammar), byte_tokenizer(marks_of(grammar))
    whole, reader = read_text(text, form), AnswerReader(form, tokenizer)
    ids = tokenizer.encode(text, trusted=True).ids
    started = time.process_time()
    for token in ids:
        reader.add([token])
    assert reader.finish() == whole
    assert time.process_time() - started < 30
    if grammar != "harmony" and all(call.problem for call in whole.calls):
        assert whole == Reading(content=text, calls=whole.calls)
