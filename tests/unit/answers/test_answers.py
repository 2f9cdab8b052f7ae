"""Answers as families of models write them, and their right readings."""

from __future__ import annotations

import json

import pytest
from dialoop.answers import AnswerForm, AnswerReader, Reading, WrittenCall, read_text
from dialoop.chat import ToolDefinition
from dialoop.errors import InvalidInput

from tests.support.families.written import THINK, byte_tokenizer, marks_of

HERMES = AnswerForm(reasoning=THINK, calls="hermes")
OTHER_FORM = "the call is not written in the form of the model's template."


def call(name: str, arguments_json: str = "{}", **fields: str) -> WrittenCall:
    return WrittenCall(name=name, arguments_json=arguments_json, **fields)


def read(text: str, calls: str, **fields) -> Reading:
    return read_text(text, AnswerForm(calls=calls, **fields))


F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ANSWERS = [
    ("hermes", f"Hi.\n{F}\n{F}\nDone.", "Hi.\nDone.", [call("f"), call("f")]),
    (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"text": "see </tool_call> here"}}</tool_call>',
        "",
        [call("w", '{"text": "see </tool_call> here"}')],
    ),
    (
        "hermes",
        '<tool_call>{"arguments":{"a":1.10,"b":"\\u00e9"} , "name":"f"}</tool_call>',
        "",
        [call("f", '{"a":1.10,"b":"\\u00e9"}')],
    ),
    ("hermes", f"Write <tool_call> tags: {F}", "Write <tool_call> tags: ", [call("f")]),
    ("hermes", f'<tool_call>{{"name": "f\n{F}', '<tool_call>{"name": "f', [call("f")]),
    ("hermes", f'{F}\n<tool_call>\n{{"name', '\n<tool_call>\n{"name', [call("f")]),
    (
        "hermes",
        f'<tool_call>{{"a": "oops}}</tool_call> "so" {F}',
        '<tool_call>{"a": "oops}</tool_call> "so" ',
        [call("", problem="the call is not JSON."), call("f")],
    ),
    (
        "xml",
        "So\n<tool_call>\n<function=f>\n<parameter=a>\nsee </tool_call>, </parameter>\n\n"
        "</parameter>\n</function>\n</tool_call>",
        "So",
        [call("f", '{"a":"see </tool_call>, </parameter>\\n"}')],
    ),
    (
        "xml",
        "<tool_call><function=f></function></tool_call>\n<tool_call><function=g><parameter=k>"
        "</parameter></function></tool_call>.",
        ".",
        [call("f"), call("g", '{"k":""}')],
    ),
    (
        "xml",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        [call("f", problem=OTHER_FORM)],
    ),
    ("xml", f"{F}", F, [call("", problem=OTHER_FORM)]),
    (
        "arg_key",
        "Two.\n<tool_call>f\n<arg_key>größe</arg_key>\n<arg_value>世 </tool_call></arg_value>\n"
        "</tool_call>\n<tool_call>g\n</tool_call> So.",
        "Two. So.",
        [call("f", '{"größe":"世 </tool_call>"}'), call("g")],
    ),
    (
        "arg_key",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        [call("f", problem=OTHER_FORM)],
    ),
    ("arg_key", F, F, [call("", problem=OTHER_FORM)]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
        '<|tool_call_argument_begin|>{"t": "<|tool_call_end|>"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "",
        [call("f", '{"t": "<|tool_call_end|>"}', id="functions.f:3")],
    ),
    ("kimi", "<|tool_calls_section_end|>", "<|tool_calls_section_end|>", []),
    ("mistral", "So.[TOOL_CALLS]f[ARGS]{}", "So.", [call("f")]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]}"}[TOOL_CALLS] g[CALL_ID]abc12[ARGS] {"b": [1]}',
        "",
        [call("f", '{"a": "[TOOL_CALLS]}"}'), call("g", '{"b": [1]}', id="abc12")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
        "",
        [call("f"), call("g", '{"a": 1}')],
    ),
    ("mistral", "[TOOL_CALLS]f{}", "", [call("f")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "", None),
    ("mistral", "[TOOL_CALLS]see f[ARGS]{} [TOOL_CALLS][]", "", None),
    (
        "json",
        'Look:\n{"name": "f", "parameters": {"a": "}"}}; {"name": "g", "arguments": {}}\nSo.',
        "Look:\nSo.",
        [call("f", '{"a": "}"}'), call("g")],
    ),
    (
        "json",
        '{"type": "function", "name": "f", "parameters": {}}',
        "",
        [call("f")],
    ),
    ("json", 'An object {"name": "f", "parameters": {}}', "", None),
    ("json", '{"answer": {"name": "f", "parameters": {}}}', "", None),
    ("json", '{"name": "f", "parameters": {"a": 1}', "", None),
    (
        "pythonic",
        "[f(a=-1.5, b='it\\'s \"]\"', c=[None, True, {'k': (1, 2)}]), a.g()]",
        "",
        [call("f", '{"a":-1.5,"b":"it\'s \\"]\\"","c":[null,true,{"k":[1,2]}]}'), call("a.g")],
    ),
    ("pythonic", "[1] Smith, [link](url)", "", None),
    (
        "pythonic",
        "[f(1)]",
        "[f(1)]",
        [call("", problem=OTHER_FORM)],
    ),
    (
        "gemma",
        'Well.\n```tool_code\nprint(f(a="```"))\ng()\n```',
        "Well.",
        [call("f", '{"a":"```"}'), call("g")],
    ),
    ("gemma", "```python\nf(a=1)\n```", "", None),
    (
        "gemma",
        '<|tool_call>call:f{a:<|"|><tool_call|><|"|>,b:[1,true],c:{d:null}}<tool_call|>',
        "",
        [call("f", '{"a":"<tool_call|>","b":[1,true],"c":{"d":null}}')],
    ),
    (
        "gemma",
        "<start_function_call>call:f{a:<escape>x<escape>,n:3}<end_function_call>",
        "",
        [call("f", '{"a":"x","n":3}')],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>"
        'commentary json<|message|>{"a": "<|call|>"}<|call|>',
        "I look.",
        [call("f", '{"a": "<|call|>"}')],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|>{oops<|call|>",
        "<|channel|>commentary to=functions.f<|message|>{oops<|call|>",
        [call("f", problem="the arguments are not JSON.")],
    ),
    ("harmony", "<|channel|>final<|message|>4<|return|>", "4", []),
    ("harmony", "No channel at all.", "", None),
]


@pytest.mark.parametrize(("grammar", "text", "content", "calls"), ANSWERS)
def test_an_answer_is_read_as_it_was_meant(grammar, text, content, calls):
    """Where `calls` is None the text is content, unchanged."""
    expected = (
        Reading(content=text) if calls is None else Reading(content=content, calls=tuple(calls))
    )
    assert read(text, grammar) == expected
    for marks in (marks_of(grammar), ()):
        tokenizer = byte_tokenizer(marks)
        reader = AnswerReader(AnswerForm(calls=grammar), tokenizer)
        for token in tokenizer.encode(text, trusted=True).ids:
            reader.add([token])
        assert reader.finish() == expected


def test_a_call_in_a_thought_is_none():
    text = f"<think>\n{F}\n\n</think>\n\nSeven."
    assert read_text(text, HERMES) == Reading(reasoning=F, content="Seven.")
    opened = AnswerForm(reasoning=THINK, calls="hermes", starts_in_reasoning=True)
    assert read_text(text.removeprefix("<think>"), opened) == read_text(text, HERMES)
    assert read_text("thought", opened) == Reading(reasoning="thought")
    assert read_text(f"So.<think>{F}</think>", HERMES).calls == (call("f"),)


def test_where_no_calls_are_offered_their_text_is_content():
    form = AnswerForm(reasoning=THINK, calls="hermes", reads_calls=False)
    assert read_text(F, form) == Reading(content=F)
    harmony = AnswerForm(calls="harmony", reads_calls=False)
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert read_text(text, harmony) == Reading(content=text)


def test_channels_are_read_where_a_template_has_them_and_no_calls():
    form = AnswerForm(reasoning=("<|channel|>analysis<|message|>", "<|end|>"))
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert read_text(text, form) == Reading(reasoning="hm", content="4")
    prompted = AnswerForm(reasoning=form.reasoning, starts_in_reasoning=True)
    text = text.removeprefix("<|channel|>analysis<|message|>")
    assert read_text(text, prompted) == Reading(reasoning="hm", content="4")


def test_a_mark_of_one_token_counts_only_where_one_token_holds_it():
    tokenizer = byte_tokenizer((*marks_of("hermes"), ".\n\n<tool_call>"))
    body = '\n{"name": "f", "arguments": {}}\n'
    mark, end = (tokenizer.single_token(text) for text in ("<tool_call>", "</tool_call>"))
    merged = tokenizer.single_token(".\n\n<tool_call>")
    spelled = [token for c in "<tool_call>" for token in tokenizer.encode(c).ids]
    inner = list(tokenizer.encode(body).ids)
    read = {}
    for name, opening in (("mark", [mark]), ("merged", [merged]), ("spelled", spelled)):
        reader = AnswerReader(HERMES, tokenizer)
        reader.add([*tokenizer.encode("So").ids, *opening, *inner, end])
        read[name] = reader.finish()
    assert read["mark"] == Reading(content="So", calls=(call("f"),))
    assert read["merged"] == Reading(content="So.\n", calls=(call("f"),))
    assert read["spelled"] == Reading(content=f"So<tool_call>{body}</tool_call>")


def test_the_end_of_turn_is_no_content_and_one_inside_is():
    tokenizer = byte_tokenizer(marks_of("hermes"))
    (end,) = tokenizer.end_of_turn_ids
    for ids, content in (([65, end], "`"), ([65, end, 65, end], "`<|im_end|>`")):
        reader = AnswerReader(AnswerForm(), tokenizer)
        for token in ids:
            reader.add([token])
        assert reader.finish().content == content.replace("`", tokenizer.decode([65]))


def test_an_end_of_turn_that_is_a_mark_ends_a_call():
    tokenizer = byte_tokenizer(marks_of("harmony"), ends=("<|return|>", "<|call|>"))
    reader = AnswerReader(AnswerForm(calls="harmony"), tokenizer)
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
    reader.add(tokenizer.encode(text, trusted=True).ids)
    assert reader.finish() == Reading(calls=(call("f", '{"a": 1}'),))


SCHEMA = {
    "$defs": {"size": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "rows": {"type": "array"},
        "table": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "both": {"type": ["integer", "string"]},
        "size": {"$ref": "#/$defs/size"},
        "level": {"enum": [1, 2]},
        "any": {},
    },
    "required": ["größe"],
}
VALUES = [
    ("text", "12", "12"),
    ("count", "12", 12),
    ("count", " 12\n", 12),
    ("count", "twelve", "twelve"),
    ("count", "1.5", "1.5"),
    ("count", "9" * 5000, "9" * 5000),
    ("share", "1.50", 1.5),
    ("share", "NaN", "NaN"),
    ("share", "1e999", "1e999"),
    ("flag", "true", True),
    ("flag", "False", False),
    ("flag", "1", "1"),
    ("rows", '["é", 1]', ["é", 1]),
    ("rows", "[" * 100_000, "[" * 100_000),
    ("table", '{"a": {"b": null}}', {"a": {"b": None}}),
    ("table", "[1]", "[1]"),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("maybe", "nothing", "nothing"),
    ("both", "5", 5),
    ("both", "five", "five"),
    ("size", "5", 5),
    ("level", "2", 2),
    ("any", "2", "2"),
    ("unknown", "2", "2"),
]


@pytest.mark.parametrize("grammar", ["xml", "arg_key"])
@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_an_argument_is_read_by_the_tools_schema(grammar, name, text, value):
    tools = (ToolDefinition(name="f", parameters_json=json.dumps(SCHEMA)),)
    written = {
        "xml": f"<function=f><parameter={name}>\n{text}\n</parameter></function>",
        "arg_key": f"f<arg_key>{name}</arg_key><arg_value>{text}</arg_value>",
    }[grammar]
    written = f"<tool_call>{written}</tool_call>"
    (read_call,) = read_text(written, AnswerForm(calls=grammar), tools).calls
    assert not read_call.problem
    got = json.loads(read_call.arguments_json)[name]
    assert (got, type(got)) == (value, type(value))
    (untyped,) = read(written, grammar).calls
    assert isinstance(json.loads(untyped.arguments_json)[name], str)


def test_a_typed_argument_keeps_its_spelling():
    tools = (ToolDefinition(name="f", parameters_json=json.dumps(SCHEMA)),)
    text = "<tool_call><function=f><parameter=share>1.50</parameter></function></tool_call>"
    (read_call,) = read_text(text, AnswerForm(calls="xml"), tools).calls
    assert read_call.arguments_json == '{"share":1.50}'


@pytest.mark.parametrize("schema", ["", "[]", "{", '{"properties": 3}', '{"properties": {"a": 3}}'])
def test_a_schema_that_says_nothing_leaves_text(schema):
    tools = (ToolDefinition(name="f", parameters_json=schema),)
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert read_text(text, AnswerForm(calls="xml"), tools).calls == (call("f", '{"a":"1"}'),)


LENIENT = [
    ('{"name": "f"}', call("f")),
    ('{"tool": "f", "args": {"a": 1}, "id": 7}', call("f", '{"a": 1}', id="7")),
    ('{"name": "f", "arguments": "{\\"a\\":1}"}', call("f", '{"a":1}')),
    ('{"name": "f", "arguments": "x"}', call("f", problem="the arguments are not JSON.")),
    ('{"name": "f", "arguments": [1]}', call("f", problem="the arguments must be a JSON object.")),
    ("[1]", call("", problem="a call must be a JSON object.")),
    ('{"arguments": {}}', call("", problem="the call names no tool.")),
    ('{"name": "f", "arguments": {"a": NaN}}', call("", problem="the call is not JSON.")),
]


@pytest.mark.parametrize(("body", "expected"), LENIENT)
def test_a_lenient_form_takes_calls_that_are_not_exact(body, expected):
    text = f"<tool_call>{body}</tool_call>"
    assert read(text, "hermes", is_lenient=True).calls == (expected,)
    (strict,) = read(text, "hermes").calls
    assert strict.problem


def test_a_stop_string_is_cut_off_in_whatever_tokens_it_stands():
    tokenizer = byte_tokenizer(marks_of("hermes"))
    for cut, content in (("END", "one "), ("ll>\n{", "one END<tool_ca"), ("none", "one END")):
        reader = AnswerReader(HERMES, tokenizer, cut=(cut, ""))
        for token in tokenizer.encode(f"one END{F}", trusted=True).ids:
            reader.add([token])
            assert content.startswith(reader.reading.content)
        assert reader.finish() == Reading(
            content=content, calls=(call("f"),) if cut == "none" else ()
        )


THOUGHT = "<think>\nEND\n</think>\n"
ANALYSIS = "<|channel|>analysis<|message|>END<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY = AnswerForm(calls="harmony")
STARTED = AnswerForm(reasoning=THINK, calls="hermes", starts_in_reasoning=True)
CUT = [
    (HERMES, f"{THOUGHT}\none END two", Reading(content="one ", reasoning="END"), True),
    (HERMES, f"{THOUGHT}\nEND", Reading(reasoning="END"), True),
    (HERMES, " one END", Reading(content=" one "), True),
    (HERMES, "<think>END", Reading(reasoning="END"), False),
    (HERMES, "END<think>", Reading(), True),
    (STARTED, "END</think>one END", Reading(content="one ", reasoning="END"), True),
    (STARTED, "EN</think>D", Reading(content="D", reasoning="EN"), False),
    (
        HERMES,
        f'{THOUGHT}one{F}<tool_call>{{"name": "END',
        Reading(content='one<tool_call>{"name": "', reasoning="END", calls=(call("f"),)),
        True,
    ),
    (
        HARMONY,
        f"{ANALYSIS}{COMMENTARY}{ANALYSIS}{FINAL}one END",
        Reading(content="So.\none ", reasoning="END\nEND"),
        True,
    ),
    (
        HARMONY,
        f'{ANALYSIS}<|channel|>commentary to=functions.f<|message|>{{"a": "END"}}<|call|>',
        Reading(
            content='<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": "',
            reasoning="END",
            calls=(call("f", problem="the arguments are not JSON."),),
        ),
        True,
    ),
    (HARMONY, "one END", Reading(content="one "), True),
    (HARMONY, f"{FINAL}EN<|end|><|start|>assistant{FINAL}D", Reading(content="EN\nD"), False),
]


@pytest.mark.parametrize(("form", "text", "expected", "is_cut"), CUT)
@pytest.mark.parametrize("marks", [True, False])
def test_a_stop_string_is_looked_for_outside_of_thoughts(form, text, expected, is_cut, marks):
    tokenizer = byte_tokenizer(marks_of(form.calls) if marks else ())
    ids = tokenizer.encode(text, trusted=True).ids
    step = AnswerReader(form, tokenizer, cut=("END", "never"))
    ends = [step.stop_string for token in ids for _ in (step.add([token]),)]
    rest = tokenizer.decode(ids[ends.index("END") + 1 :]) if "END" in ends else None
    assert rest == text.rpartition("END")[2] if is_cut else rest is None
    assert step.finish() == expected
    at_once = AnswerReader(form, tokenizer, cut=("END", "never"))
    at_once.add(ids)
    assert at_once.finish() == expected
    assert at_once.stop_string == step.stop_string == ("END" if is_cut else None)


def test_a_form_of_an_unknown_grammar_is_refused():
    with pytest.raises(InvalidInput, match="no grammar of calls named 'latin'"):
        AnswerForm(calls="latin")
