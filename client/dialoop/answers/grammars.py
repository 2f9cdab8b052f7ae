r"""The ways in which families of models write tool calls: a grammar each.

hermes    <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>     Hermes, Qwen2.5, Qwen3
xml       <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>...        Qwen3-Coder, Qwen3.5
arg_key   <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>...      GLM-4.5 and later
deepseek  f and {"a": 1} between marks of its own, perhaps in a fence          DeepSeek V3, R1, V3.1
kimi      <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
json      {"name": "f", "parameters": {"a": 1}}                                Llama 3.1
mistral   [TOOL_CALLS]f[ARGS]{"a": 1}, [TOOL_CALLS][{"name": "f", ...}]        Mistral
pythonic  [f(a=1)]                                                             Llama 3.2 and 4, LFM2
gemma     ```tool_code\nf(a=1)\n```, <|tool_call>call:f{a:1}<tool_call|>       Gemma
harmony   <|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>      gpt-oss

A grammar is data: what opens and closes a call, which scanner finds its end, and which function
reads its body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dialoop.answers.marks import Spelling
from dialoop.answers.scanning import (
    Literals,
    Scanner,
    Stops,
    json_object_scanner,
    json_scanner,
    literals_scanner,
    python_block_scanner,
    python_scanner,
)
from dialoop.answers.values import (
    JsonValue,
    argument_json,
    argument_types,
    as_json,
    is_encodable,
    read_bare_object,
    read_elements,
    read_json,
    read_members,
    read_python_calls,
)
from dialoop.messages import ToolDefinition

NOT_JSON = "the call is not JSON."
NO_OBJECT = "a call must be a JSON object."
NO_NAME = "the call names no tool."
ARGUMENTS_NOT_JSON = "the arguments are not JSON."
ARGUMENTS_NO_OBJECT = "the arguments must be a JSON object."
OTHER_KEYS = "a call has a name and arguments, and nothing else."
OTHER_FORM = "the call is not written in the form of the model's template."


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as the policy wrote it; `arguments_json` is an object.

    problem: why it cannot be carried out; its text is content then. id: as written, often "".
    """

    name: str
    arguments_json: str = "{}"
    problem: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyContext:
    """What the reading of a body needs beside it.

    is_lenient: takes JSON calls with other keys, or arguments that are JSON within a string.
    """

    spelling: Spelling
    tools: Sequence[ToolDefinition] = ()
    is_lenient: bool = False

    def types_of(self, name: str) -> Mapping[str, frozenset[str]]:
        """Return the types of a tool's arguments; none for an unknown tool."""
        for tool in self.tools:
            if tool.name == name:
                return argument_types(tool.parameters_json)
        return {}


BodyReader = Callable[[str, BodyContext], "list[WrittenCall]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """One way to write calls: what stands around a body, and how the body is read.

    openings: texts before a body; a line end of the syntax's own is part of them. closings: marks
    after it; none where the body's own last bracket ends it. head: what such a body begins with,
    and its beginnings. marks: further marks in a body.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    scanner: Callable[[Spelling, Stops], Scanner]
    read: BodyReader
    head: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a family writes calls.

    beside: what stands around several calls and is no content. marks: all that the grammar calls
    a mark. has_channels: the whole answer consists of channels, as gpt-oss's.
    """

    name: str
    shapes: tuple[CallShape, ...] = ()
    beside: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    has_channels: bool = False


def _read_hermes(body: str, context: BodyContext) -> list[WrittenCall]:
    return [_json_call(context.spelling.plain(body), context, ("arguments",))]


def _read_llama(body: str, context: BodyContext) -> list[WrittenCall]:
    return [_json_call(context.spelling.plain(body), context, ("parameters", "arguments"))]


def _read_mistral(body: str, context: BodyContext) -> list[WrittenCall]:
    """Return the call in f[ARGS]{...}, or those in [{"name": ..., "arguments": {...}}]."""
    text = context.spelling.plain(body).lstrip()
    if not text.startswith("["):
        head, brace, rest = text.partition("{")
        name, _, marked = head.partition("[")
        own_id = marked.partition("CALL_ID]")[2].partition("[")[0].strip()
        return [_call(name.strip(), read_json(brace + rest), own_id)]
    elements = read_elements(text)
    if not elements:
        return [WrittenCall(name="", problem=NOT_JSON if elements is None else NO_NAME)]
    calls = []
    for element in elements:
        members = read_members(element)
        if members is None or not {"name", "arguments"} <= members.keys() <= _MISTRAL_KEYS:
            return [WrittenCall(name="", problem=NO_OBJECT if members is None else OTHER_KEYS)]
        calls.append(_lenient_call(members, ("arguments",)))
    return calls


def _json_call(body: str, context: BodyContext, keys: tuple[str, ...]) -> WrittenCall:
    """Return the call in {"name": ..., "arguments": {...}}."""
    members = read_members(body)
    if members is None:
        is_json = read_json(body) is not None
        return WrittenCall(name="", problem=NO_OBJECT if is_json else NOT_JSON)
    if context.is_lenient:
        return _lenient_call(members, keys)
    key = next((key for key in keys if key in members), "")
    kind = members.pop("type", None) if "parameters" in keys else None
    if members.keys() != {"name", key} or (kind is not None and kind.value != "function"):
        return WrittenCall(name="", problem=OTHER_KEYS)
    name, arguments = members["name"].value, members[key]
    return _call(name if isinstance(name, str) else "", arguments)


def _lenient_call(members: Mapping[str, JsonValue], keys: tuple[str, ...]) -> WrittenCall:
    empty = JsonValue(value={}, text="{}")
    name = members.get("name", members.get("tool", JsonValue(value="", text='""'))).value
    own_id = members.get("tag", members.get("id", JsonValue(value="", text='""'))).value
    written = next((members[key] for key in (*keys, "args") if key in members), empty)
    if isinstance(written.value, str):  # some models write the arguments as JSON within JSON
        inner = read_json(written.value)
        if inner is None:
            return WrittenCall(name=str(name), id=str(own_id), problem=ARGUMENTS_NOT_JSON)
        written = inner
    return _call(str(name), written, str(own_id))


def _call(name: str, arguments: JsonValue | None, call_id: str = "") -> WrittenCall:
    """Return the call where it has a name and an object, else its problem."""
    if not name or not is_encodable(name):
        return WrittenCall(name="", id=call_id, problem=NO_NAME)
    if arguments is None:
        return WrittenCall(name=name, id=call_id, problem=ARGUMENTS_NOT_JSON)
    if not isinstance(arguments.value, dict):
        return WrittenCall(name=name, id=call_id, problem=ARGUMENTS_NO_OBJECT)
    return WrittenCall(name=name, id=call_id, arguments_json=arguments.text)


def _object_of(pairs: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{as_json(name)}:{text}" for name, text in pairs.items()) + "}"


_XML_HEAD = re.compile(r"\s*<function=([^>]*)>\s*")
_XML_NAME = re.compile(r"<parameter=([^>]*)>")
_XML_END = re.compile(r"</parameter>(?=\s{0,16}(?:<parameter=|</function>))")
_XML_TAIL = re.compile(r"\s*</function>\s*")


def _read_xml(body: str, context: BodyContext) -> list[WrittenCall]:
    """Return the call in <function=f><parameter=a>1</parameter></function>."""
    plain = context.spelling.plain
    head = _XML_HEAD.match(body)
    if head is None:
        return [WrittenCall(name="", problem=OTHER_FORM)]
    name, position = plain(head[1]).strip(), head.end()
    types, pairs = context.types_of(name), dict[str, str]()
    while (start := _XML_NAME.match(body, position)) is not None:
        end = _XML_END.search(body, start.end())
        if end is None:
            return [WrittenCall(name=name, problem=OTHER_FORM)]
        key, value = plain(start[1]).strip(), plain(body[start.end() : end.start()])
        value = value.removeprefix("\n").removesuffix("\n")
        pairs[key] = argument_json(value, types.get(key, frozenset()))
        position = _behind_blanks(body, end.end())
    if _XML_TAIL.fullmatch(body, position) is None:
        return [WrittenCall(name=name, problem=OTHER_FORM)]
    return [_call(name, JsonValue(value=dict(pairs), text=_object_of(pairs)))]


def _read_arg_keys(body: str, context: BodyContext) -> list[WrittenCall]:
    """Return the call in f <arg_key>a</arg_key><arg_value>1</arg_value>."""
    spelled, plain = context.spelling.spelled, context.spelling.plain
    key_start, key_end = spelled("<arg_key>"), spelled("</arg_key>")
    value_start = spelled("<arg_value>")
    value_end = re.compile(
        re.escape(spelled("</arg_value>")) + r"(?=\s{0,16}(?:\Z|" + re.escape(key_start) + "))"
    )
    first = body.find(key_start)
    name = plain(body if first < 0 else body[:first]).strip()
    position = len(body) if first < 0 else first
    types, pairs = context.types_of(name), dict[str, str]()
    broken = [WrittenCall(name="" if _NO_NAME.search(name) else name, problem=OTHER_FORM)]
    while position < len(body):
        middle = body.find(key_end, position)
        start = body.find(value_start, middle)
        end = value_end.search(body, start) if start >= 0 else None
        between = body[middle + len(key_end) : start]
        if middle < 0 or end is None or between.strip() or not body.startswith(key_start, position):
            return broken
        key = plain(body[position + len(key_start) : middle]).strip()
        value = plain(body[start + len(value_start) : end.start()])
        pairs[key] = argument_json(value, types.get(key, frozenset()))
        position = _behind_blanks(body, end.end())
    if not broken[0].name and name:
        return broken
    return [_call(name, JsonValue(value=dict(pairs), text=_object_of(pairs)))]


_BLANKS = re.compile(r"\s*")
_NO_NAME = re.compile(r'[\s<>{}"]')


def _behind_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None  # it matches nothing, too
    return match.end()


def _read_deepseek(body: str, context: BodyContext) -> list[WrittenCall]:
    """Return the call in `f<sep>{...}`, or in `function<sep>f` and a fence of JSON."""
    head, mark, rest = body.partition(context.spelling.spelled(_DEEPSEEK_SEP))
    if not mark:
        return [WrittenCall(name="", problem=OTHER_FORM)]
    name, fence, fenced = rest.partition("\n```json\n")
    arguments = fenced.rstrip().removesuffix("```") if fence and "{" not in name else rest
    name = name if fence and "{" not in name else head
    plain = context.spelling.plain
    return [_call(plain(name).strip(), read_json(plain(arguments)))]


def _read_kimi(body: str, context: BodyContext) -> list[WrittenCall]:
    """Return the call in `functions.f:0<sep>{...}`."""
    plain = context.spelling.plain
    head, mark, arguments = body.partition(context.spelling.spelled(_KIMI_SEP))
    if not mark:
        return [WrittenCall(name="", problem=OTHER_FORM)]
    own_id = plain(head).strip()
    name, _, number = own_id.removeprefix("functions.").rpartition(":")
    if not number.isdigit():
        name = own_id.removeprefix("functions.")
    return [_call(name, read_json(plain(arguments)), own_id)]


def _read_python(body: str, context: BodyContext) -> list[WrittenCall]:
    calls = read_python_calls(context.spelling.plain(body))
    if calls is None:
        return [WrittenCall(name="", problem=OTHER_FORM)]
    return [WrittenCall(name=name, arguments_json=arguments) for name, arguments in calls]


def _bare_reader(quote: str) -> BodyReader:
    def read(body: str, context: BodyContext) -> list[WrittenCall]:
        """Return the call in `call:f{a:1}`."""
        plain = context.spelling.plain
        mark, brace, rest = body.partition("{")
        name = plain(mark).strip().removeprefix("call:")
        arguments = read_bare_object(plain(brace + rest), quote)
        if arguments is None or name == plain(mark).strip():
            return [WrittenCall(name="", problem=OTHER_FORM)]
        return [_call(name, JsonValue(value={}, text=arguments))]

    return read


def _json(_: Spelling, stops: Stops) -> Scanner:
    return json_scanner(stops)


def _literals(
    start: str, end: str, then: tuple[str, ...] = (), broken: tuple[str, str] | None = None
) -> Callable[[Spelling, Stops], Scanner]:
    """Return what makes the scanner of bodies with literals in tags, for a spelling.

    then: what has to follow an end. broken: two texts that end the call even in a literal.
    """

    def scanner(spelling: Spelling, stops: Stops) -> Scanner:
        def escaped(text: str) -> str:
            return re.escape(spelling.spelled(text))

        pattern = f"(?P<end>{escaped(end)})"
        if then:
            pattern += rf"(?=\s{{0,16}}(?:{'|'.join(map(escaped, then))}))"
        if broken is not None:
            pattern += rf"|{escaped(broken[0])}\s{{0,16}}{escaped(broken[1])}"
        longest = 16 + max(len(end) + max(map(len, then), default=0), sum(map(len, broken or ())))
        literals = Literals(start=spelling.spelled(start), end=re.compile(pattern), longest=longest)
        return literals_scanner(stops, literals)

    return scanner


def _wide(name: str) -> str:
    """Return DeepSeek's mark of that name, which has bars of full width."""
    return f"<\uff5ctool\u2581{name}\uff5c>"


_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_ARG_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_ALL, _DEEPSEEK_ALL_END = _wide("calls\u2581begin"), _wide("calls\u2581end")
_DEEPSEEK_ONE, _DEEPSEEK_ONE_END = _wide("call\u2581begin"), _wide("call\u2581end")
_DEEPSEEK_SEP = _wide("sep")
_KIMI_ALL, _KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_ONE, _KIMI_ONE_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_SEP = "<|tool_call_argument_begin|>"
# f[CALL_ID]abc[ARGS], and its beginnings; a mark of one token is one character here.
_MISTRAL_MARK = r"(?:[\udc80-\udcff]|\[(?:CALL_ID|ARGS)\])\w{0,64}"
_MISTRAL_NAME = rf"\s{{0,16}}[\w.-]{{1,64}}(?:{_MISTRAL_MARK}){{0,2}}\s{{0,16}}"
_MISTRAL_START = (
    rf"\s{{0,16}}(?:[\w.-]{{1,64}}(?:{_MISTRAL_MARK}){{0,2}}(?:\[[A-Z_]{{0,7}}|\s{{0,16}}))?"
)
_MISTRAL_KEYS = {"name", "arguments", "id"}
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def _in_tool_call(
    scanner: Callable[..., Scanner], read: BodyReader, marks: Sequence[str]
) -> CallShape:
    return CallShape(
        openings=("\n" + _TOOL_CALL, _TOOL_CALL),
        closings=(_TOOL_CALL_END,),
        marks=tuple(marks),
        scanner=scanner,
        read=read,
    )


def _in_sections(all_calls: str, one: str, end: str, sep: str, read: BodyReader) -> CallShape:
    return CallShape(
        openings=(f"{all_calls}{one}", f"{all_calls}\n{one}", f"\n{one}", one),
        closings=(end,),
        marks=(sep, all_calls),
        scanner=_json,
        read=read,
    )


def _grammar(name: str, *shapes: CallShape, beside: tuple[str, ...] = ()) -> CallGrammar:
    texts = [*beside]
    for shape in shapes:
        alone = () if shape.head else shape.openings[-1:]
        texts += [*alone, *shape.closings, *shape.marks]
    marks = dict.fromkeys(text.lstrip("\n") for text in texts if len(text) > 1)
    return CallGrammar(name=name, shapes=shapes, beside=beside, marks=tuple(marks))


_ALL = (
    _grammar("hermes", _in_tool_call(_json, _read_hermes, ())),
    _grammar(
        "xml",
        _in_tool_call(
            _literals(
                "<parameter=",
                "</parameter>",
                then=("<parameter=", "</function>"),
                broken=("</function>", _TOOL_CALL_END),
            ),
            _read_xml,
            (),
        ),
    ),
    _grammar(
        "arg_key",
        _in_tool_call(
            _literals("<arg_value>", "</arg_value>", then=("<arg_key>", _TOOL_CALL_END)),
            _read_arg_keys,
            _ARG_MARKS,
        ),
    ),
    _grammar(
        "deepseek",
        _in_sections(
            _DEEPSEEK_ALL, _DEEPSEEK_ONE, _DEEPSEEK_ONE_END, _DEEPSEEK_SEP, _read_deepseek
        ),
        beside=("\n" + _DEEPSEEK_ALL_END, _DEEPSEEK_ALL_END),
    ),
    _grammar(
        "kimi",
        _in_sections(_KIMI_ALL, _KIMI_ONE, _KIMI_ONE_END, _KIMI_SEP, _read_kimi),
        beside=("\n" + _KIMI_ALL_END, _KIMI_ALL_END),
    ),
    _grammar(
        "json",
        CallShape(
            openings=("<|python_tag|>{", "\n{", "; {", ";{", ", {", "{"),
            scanner=lambda *_: json_object_scanner(),
            read=_read_llama,
            marks=("<|python_tag|>",),
            head=(
                r'\{\s{0,16}"(?:name|type|parameters|arguments)"\s{0,16}:',
                r'\{\s{0,16}(?:"\w{0,10}(?:"\s{0,16})?)?',
            ),
        ),
    ),
    _grammar(
        "mistral",
        CallShape(
            openings=("[TOOL_CALLS]",),
            marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            scanner=lambda *_: json_object_scanner(re.compile(_MISTRAL_NAME)),
            read=_read_mistral,
            head=(
                rf"{_MISTRAL_NAME}\{{|\s{{0,16}}\[\s{{0,16}}\{{",
                rf"{_MISTRAL_START}|\s{{0,16}}\[\s{{0,16}}",
            ),
        ),
    ),
    _grammar(
        "pythonic",
        CallShape(
            openings=("<|python_start|>[", "\n[", "["),
            scanner=lambda *_: python_scanner(),
            read=_read_python,
            marks=("<|python_start|>",),
            head=(r"\[\s{0,16}[^\W\d][\w.]{0,127}\s?\(", r"\[\s{0,16}(?:[^\W\d][\w.]{0,127}\s?)?"),
        ),
        CallShape(
            openings=("\n<|tool_call_start|>", "<|tool_call_start|>"),
            closings=("<|tool_call_end|>",),
            scanner=lambda _, stops: python_block_scanner(stops),
            read=_read_python,
        ),
        beside=("<|python_end|>",),
    ),
    _grammar(
        "gemma",
        CallShape(
            openings=("\n```tool_code\n", "```tool_code\n"),
            closings=("\n```", "```"),
            scanner=lambda _, stops: python_block_scanner(stops),
            read=_read_python,
        ),
        CallShape(
            openings=("<start_function_call>",),
            closings=("<end_function_call>",),
            marks=("<escape>",),
            scanner=_literals("<escape>", "<escape>"),
            read=_bare_reader("<escape>"),
        ),
        CallShape(
            openings=("<|tool_call>",),
            closings=("<tool_call|>",),
            marks=('<|"|>',),
            scanner=_literals('<|"|>', '<|"|>'),
            read=_bare_reader('<|"|>'),
        ),
    ),
    CallGrammar(
        name="harmony", marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *MESSAGE_ENDS), has_channels=True
    ),
)

GRAMMARS: Mapping[str, CallGrammar] = MappingProxyType({grammar.name: grammar for grammar in _ALL})


def read_channel_call(recipient: str, body: str, context: BodyContext) -> WrittenCall:
    """Return the call that a message of gpt-oss to a function is."""
    if not recipient.startswith("functions."):
        return WrittenCall(name="", problem=NO_NAME)
    name = recipient.removeprefix("functions.")
    return _call(name, read_json(context.spelling.plain(body)))
