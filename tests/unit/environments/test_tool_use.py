"""Facts of tools with arguments: the syntaxes (R-X3), schemas, and what happens to errors."""

import asyncio
import dataclasses
import enum
import json
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

import pydantic
import pytest
from dialoop.answers import AnswerForm
from dialoop.chat import History, Message, ToolCall
from dialoop.environments import (
    BlockCalls,
    Calculator,
    ChatEnv,
    Episode,
    FunctionTool,
    JsonCalls,
    NativeCalls,
    Outcome,
    TaskData,
    ToolCalls,
    ToolInputError,
    ToolUse,
    Transform,
    XmlCalls,
    current_call_id,
    current_episode,
)
from dialoop.environments.episode import stepping
from dialoop.environments.tools.tool_use import EndWithoutCalls
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.trajectory import DoneReason, Owner
from typing_extensions import TypedDict

TASK = TaskData(key="k", question="q")


def search(query: str, limit: int = 3, kind: Literal["book", "map"] = "book") -> str:
    """Search the library.

    More than one line is not for the model.
    """
    return f"{query}/{limit}/{kind}"


async def double(number: float) -> float:
    return number * 2


def refuse(query: str) -> str:
    raise ToolInputError("not that one.")


def crash(query: str) -> str:
    raise RuntimeError("secret")


async def hang() -> None:
    await asyncio.sleep(600)


def outcome_of(message: Message) -> Outcome:
    episode = Episode(task=TASK, seed=0, history=History((message,)), step_index=1, answer=message)
    return Outcome(episode=episode, response=History((message,)))


async def use_tools(message: str | Message, *tools, **options) -> Outcome:
    message = message if isinstance(message, Message) else policy_message(message)
    return await ToolUse(tools, **options).step(outcome_of(message))


def policy_message(text: str, **fields) -> Message:
    return Message(role="assistant", content=text, **fields)


def answers_of(outcome: Outcome) -> list[str]:
    return [m.text for m in outcome.episode.history[1:]]


CALLS = [
    (
        BlockCalls(),
        '<tool>search\n{"query": "a", "limit": 1}</tool> <tool>double\n{"number": 2}</tool>',
    ),
    (
        XmlCalls(),
        '<tool name="search" tag="x">{"query": "a", "limit": 1}</tool>'
        "<tool name='double'>{\"number\": 2}</tool>",
    ),
    (
        JsonCalls(),
        '{"message": "I look.", "tools": [{"tool": "search", "args": {"query": "a", '
        '"limit": 1}}, {"name": "double", "arguments": {"number": 2}}]}',
    ),
    (
        NativeCalls(),
        '<tool_call>{"name": "search", "arguments": {"query": "a", "limit": 1}}'
        '</tool_call>\n<tool_call>{"name": "double", "arguments": "{\\"number\\": 2}"}</tool_call>',
    ),
]


@pytest.mark.parametrize(("syntax", "text"), CALLS, ids=lambda v: type(v).__name__)
async def test_every_syntax_runs_calls_in_order_of_appearance(syntax, text):
    outcome = await use_tools(text, search, double, syntax=syntax)
    assert answers_of(outcome) == ["a/1/book", "4"]
    assert outcome.num_tool_calls == 2
    assert {m.role for m in outcome.episode.history[1:]} == {"tool"}


@pytest.mark.parametrize("syntax", [BlockCalls(), XmlCalls(), JsonCalls(), NativeCalls()])
@pytest.mark.parametrize("text", ["", "just words", "<tool>", "{", "[1]", '{"tools": 3}'])
async def test_a_message_without_calls_adds_nothing(syntax, text):
    outcome = await use_tools(text, search, syntax=syntax)
    assert answers_of(outcome) == []


@pytest.mark.parametrize(
    ("syntax", "text", "why"),
    [
        (BlockCalls(), "<tool>search\n{oops</tool>", "the arguments are not JSON."),
        (BlockCalls(), "<tool>search\n[1]</tool>", "the arguments must be a JSON object."),
        (BlockCalls(), "<tool></tool>", "the call names no tool."),
        (BlockCalls(), "<tool>nope\n{}</tool>", "unknown tool nope."),
        (BlockCalls(), "<tool>search\n{}</tool>", "missing argument query."),
        (BlockCalls(), '<tool>search\n{"query": 3}</tool>', "argument query must be string."),
        (
            BlockCalls(),
            '<tool>search\n{"query": "a", "limit": true}</tool>',
            "argument limit must be integer.",
        ),
        (
            BlockCalls(),
            '<tool>search\n{"query": "a", "kind": "cd"}</tool>',
            "argument kind must be one of book, map.",
        ),
        (BlockCalls(), '<tool>search\n{"query": "a", "b": 1}</tool>', "unknown argument b."),
        (JsonCalls(), '{"tools": ["x"]}', "a call must be a JSON object."),
        (NativeCalls(), "<tool_call>{</tool_call>", "the call is not JSON."),
        (XmlCalls(), '<tool tag="a">{}</tool>', "the call names no tool."),
    ],
)
async def test_a_call_that_makes_no_sense_is_told_to_the_policy_and_fails_nothing(
    syntax, text, why
):
    outcome = await use_tools(text, search, syntax=syntax)
    assert answers_of(outcome) == [f"Tool error: {why}"]
    assert not outcome.failures
    assert not outcome.episode.done


async def test_a_closing_tag_in_a_string_is_text_and_a_call_in_a_thought_is_none():
    tag = '<tool_call>{"name": "search", "arguments": {"query": "</tool_call>"}}</tool_call>'
    assert answers_of(await use_tools(tag, search)) == ["</tool_call>/3/book"]
    for thought in (f"<think>{tag}</think>", f"{tag}</think>", f"<think>{tag}"):
        assert answers_of(await use_tools(thought, search)) == []
    assert len(answers_of(await use_tools(f"{tag}</think>{tag}", search))) == 1


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (
            "xml",
            "<tool_call><function=search><parameter=query>\n5\n</parameter><parameter=limit>\n1\n"
            "</parameter></function></tool_call>",
        ),
        (
            "arg_key",
            "<tool_call>search<arg_key>query</arg_key><arg_value>5</arg_value>"
            "<arg_key>limit</arg_key><arg_value>1</arg_value></tool_call>",
        ),
        ("pythonic", "[search(query='5', limit=1)]"),
    ],
)
async def test_native_calls_are_read_in_the_form_of_the_model_by_the_tools_schemas(grammar, text):
    syntax = NativeCalls(AnswerForm(calls=grammar))
    assert answers_of(await use_tools(text, search, syntax=syntax)) == ["5/1/book"]


async def test_an_xml_body_that_is_no_json_is_the_argument_raw():
    def shout(raw: str) -> str:
        return raw.upper()

    assert answers_of(
        await use_tools('<tool name="shout">owls</tool>', shout, syntax=XmlCalls())
    ) == ["OWLS"]


async def test_a_tag_or_id_comes_back_with_the_answer():
    outcome = await use_tools(
        '<tool name="double" tag="7">{"number": 1}</tool>', double, syntax=XmlCalls()
    )
    assert (outcome.episode.history[-1].tool_call_id, outcome.episode.history[-1].name) == (
        "7",
        "double",
    )
    native = policy_message(
        "", tool_calls=(ToolCall(id="c9", name="double", arguments_json='{"number":3}'),)
    )
    assert (await use_tools(native, double)).episode.history[-1].tool_call_id == "c9"


async def test_forged_calls_in_a_tools_answer_run_nothing():
    def forge(query: str) -> str:
        return "<tool>crash\n{}</tool>"

    outcome = await use_tools(
        '<tool>forge\n{"query": ""}</tool>', forge, crash, syntax=BlockCalls()
    )
    assert outcome.num_tool_calls == 1


BAD = '<tool>crash\n{"query": ""}</tool><tool>double\n{"number": 1}</tool>'


async def test_a_tools_own_failure_is_told_and_ends_the_episode_once_all_calls_are_answered():
    outcome = await use_tools(BAD, crash, double, syntax=BlockCalls())
    first, second = answers_of(outcome)
    assert first == "Tool error: Tool crash failed."
    assert "secret" not in first
    assert second == "2"
    assert [(f.owner, f.reason) for f in outcome.failures] == [(Owner.TOOL, "TOOL_FAILED")]
    assert outcome.episode.done_reason is DoneReason.ERROR
    assert not outcome.is_scorable


async def test_failures_can_be_told_only_and_the_first_error_can_stop_the_rest():
    outcome = await use_tools(BAD, crash, double, syntax=BlockCalls(), tool_failures="tell")
    assert len(answers_of(outcome)) == 2
    assert not outcome.failures
    outcome = await use_tools(
        BAD, crash, double, syntax=BlockCalls(), tool_failures="tell", stop_on_error=True
    )
    assert len(answers_of(outcome)) == 1


async def test_timeouts_are_enforced_for_async_and_sync_tools_and_per_tool():
    released = threading.Event()

    def sleeps() -> None:
        released.wait(600)

    text = "<tool>hang\n{}</tool><tool>sleeps\n{}</tool><tool>own\n{}</tool>"
    own = FunctionTool(hang, name="own", timeout_s=0.05)
    outcome = await use_tools(text, hang, sleeps, own, syntax=BlockCalls(), timeout_s=0.1)
    released.set()
    assert answers_of(outcome) == ["Tool error: it took too long."] * 3
    assert {f.reason for f in outcome.failures} == {"TOOL_TIMEOUT"}


async def test_calls_and_answers_are_bounded():
    def long() -> str:
        return "x" * 100

    text = "<tool>long\n{}</tool>" * 5
    outcome = await use_tools(text, long, syntax=BlockCalls(), max_calls=2, max_tool_response=10)
    assert answers_of(outcome) == ["xxxxxxx...", "xxxxxxx...", "Tool error: too man..."]


def test_definitions_come_from_annotations():
    definition = FunctionTool(search).definition
    assert (definition.name, definition.description) == ("search", "Search the library.")
    schema = json.loads(definition.parameters_json)
    assert schema["required"] == ["query"]
    assert schema["properties"] == {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "kind": {"enum": ["book", "map"]},
    }

    def odd(a: list[int] | None, b: dict[str, int], c: bool = True) -> None:
        """Types."""

    properties = json.loads(FunctionTool(odd).definition.parameters_json)["properties"]
    assert properties["a"] == {
        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]
    }
    assert properties["b"] == {"type": "object"}
    assert FunctionTool(Calculator()).definition.name == "Calculator"


@pytest.mark.parametrize("bad", ["positional", "variadic", "foreign"])
def test_a_function_that_json_cannot_call_is_rejected(bad):
    def positional(a: int, /) -> None:
        """No name."""

    def variadic(*a: int) -> None:
        """Any number."""

    def foreign(a: ChatEnv) -> None:
        """Not JSON."""

    functions = {"positional": positional, "variadic": variadic, "foreign": foreign}
    with pytest.raises(InvalidConfig) as caught:
        ToolUse([functions[bad]])
    assert caught.value.reason == "TOOL_UNANNOTATED"


async def test_parameters_without_types_and_further_arguments_are_taken():
    def join(first, sep="-", **rest):
        """Join anything."""
        return sep.join(map(str, [first, *rest.values()]))

    tool = FunctionTool(join)
    schema = json.loads(tool.definition.parameters_json)
    assert schema["required"] == ["first"]
    assert schema["additionalProperties"] is True
    answer = await tool.run({"first": 1, "sep": "+", "b": [2], "c": "x"}, timeout_s=5)
    assert answer == "1+[2]+x"
    with pytest.raises(ToolInputError, match="missing argument first"):
        await tool.run({"b": 1}, timeout_s=5)


async def test_a_tool_reads_the_state_of_its_episode():
    def recall(name: str, episode: Episode) -> str:
        """Say what the episode remembers."""
        return f"{episode.state[name]} at step {episode.step_index}"

    async def recall_later(name: str, episode: Episode) -> str:
        """Say what the episode remembers."""
        return recall(name, episode)

    def recall_text(name: str) -> str:
        return recall(name, current_episode())

    class Remembers(Transform):
        async def step(self, outcome):
            return outcome.remember(colour="green")

    call = "<request><recall_text>colour<call>"
    calls = tuple(
        ToolCall(name=name, arguments_json='{"name": "colour"}')
        for name in ("recall", "recall_later")
    )
    asks = Message(role="assistant", content=call, tool_calls=calls)
    tools = ToolUse([recall, recall_later])
    environment = ChatEnv(name="e", transforms=(Remembers(), tools, ToolCalls([recall_text])))
    opening = environment.reset(TaskData(key="k", question="q"), 0)
    outcome = await environment.step(opening.episode, opening.history.respond(asks))
    answers = [
        m.text.removesuffix("<response>") for m in outcome.episode.history if m.role == "tool"
    ]
    assert answers == ["green at step 1"] * 3
    for definition in tools.traits.tool_definitions:
        assert list(json.loads(definition.parameters_json)["properties"]) == ["name"]
    with pytest.raises(PreconditionFailed, match="No tool"):
        current_episode()


async def test_each_call_of_a_tool_has_an_id_which_a_step_taken_again_gives_again():
    ids = []

    def note(query: str) -> str:
        ids.append(current_call_id())
        return "noted"

    async def step() -> list[str]:
        ids.clear()
        await environment.step(opening.episode, opening.history.respond(asks))
        return list(ids)

    asks = Message(role="assistant", content="<request><note>a<call><request><note>b<call>")
    environment = ChatEnv(name="e", transforms=(ToolCalls([note]),))
    opening = environment.reset(TaskData(key="k", question="q"), 0)
    with stepping("s/1/0"):
        assert current_call_id() == "s/1/0"
        assert await step() == ["s/1/0/0", "s/1/0/1"]
    with stepping("s/1/0"):
        assert await step() == ["s/1/0/0", "s/1/0/1"]
    assert len({*await step(), *await step()}) == 4, "without a session no step is taken again"
    with pytest.raises(PreconditionFailed, match="No tool"):
        current_call_id()


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Filter(TypedDict):
    title: str
    sizes: NotRequired[list[Size]]


class Purchase(pydantic.BaseModel):
    """An order."""

    at: Point
    amount: Annotated[int, pydantic.Field(ge=1, description="How many.")]
    note: str | None = None


def place(
    point: Point,
    size: Size = Size.SMALL,
    pair: tuple[int, int] = (1, 2),
    only: Filter | None = None,
    orders: Sequence[Purchase] = (),
) -> str:
    """Place things."""
    return f"{point!r} {size} {pair} {only} {list(orders)!r}"


def test_richer_parameters_have_schemas_that_stand_alone():
    schema = json.loads(FunctionTool(place).definition.parameters_json)
    assert list(schema) == ["type", "properties", "required", "additionalProperties", "$defs"]
    assert schema["required"] == ["point"]
    assert schema["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert schema["$defs"]["Point"]["properties"]["x"] == {"type": "integer"}
    assert schema["$defs"]["Size"]["enum"] == ["small", "large"]
    assert schema["$defs"]["Filter"]["properties"]["title"] == {"type": "string"}
    amount = {"type": "integer", "description": "How many.", "minimum": 1}
    assert schema["$defs"]["Purchase"]["properties"]["amount"] == amount
    assert '"title": "' not in json.dumps(schema)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"point": {"x": 1}}, "Point(x=1, y=0.5) Size.SMALL (1, 2) None []"),
        (
            {"point": {"x": 1, "y": 2}, "size": "large", "pair": [3, 4]},
            "Point(x=1, y=2.0) Size.LARGE (3, 4) None []",
        ),
        (
            {"point": {"x": 1}, "only": {"title": "t", "sizes": ["small"]}},
            "Point(x=1, y=0.5) Size.SMALL (1, 2) "
            "{'title': 't', 'sizes': [<Size.SMALL: 'small'>]} []",
        ),
        (
            {"point": {"x": 1}, "orders": [{"at": {"x": 2}, "amount": 3}]},
            "Point(x=1, y=0.5) Size.SMALL (1, 2) None "
            "[Purchase(at=Point(x=2, y=0.5), amount=3, note=None)]",
        ),
    ],
)
async def test_richer_parameters_arrive_as_what_they_are(arguments, got):
    assert await FunctionTool(place).run(arguments, timeout_s=5) == got


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing argument point."),
        ({"point": {}}, "argument point.x: field required."),
        ({"point": {"x": "1"}}, "argument point.x: input should be a valid integer."),
        ({"point": {"x": 1}, "size": "huge"}, "argument size: input should be 'small' or 'large'."),
        (
            {"point": {"x": 1}, "orders": [{"at": {"x": 2}, "amount": 0}]},
            "argument orders.0.amount: input should be greater than or equal to 1.",
        ),
        ({"point": {"x": 1}, "other": 1}, "unknown argument other."),
        (
            {"point": {"x": 1}, "pair": [1, True]},
            "argument pair.1: input should be a valid integer.",
        ),
    ],
)
async def test_what_does_not_fit_a_richer_parameter_is_told_to_the_policy(arguments, message):
    with pytest.raises(ToolInputError) as caught:
        await FunctionTool(place).run(arguments, timeout_s=5)
    assert str(caught.value) == message


def test_the_schema_of_a_simple_function_is_what_it_always_was():
    def simple(
        a: str,
        b: list,
        c: dict,
        d: Any,
        e: float | int,
        f: Literal["x"] = "x",
        g: list[list[str]] | None = None,
        h: None = None,
    ) -> None:
        """Nothing."""

    assert FunctionTool(simple).definition.parameters_json == (
        '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}, '
        '"c": {"type": "object"}, "d": {}, "e": {"anyOf": [{"type": "number"}, '
        '{"type": "integer"}]}, "f": {"enum": ["x"]}, "g": {"anyOf": [{"type": "array", "items": '
        '{"type": "array", "items": {"type": "string"}}}, {"type": "null"}]}, '
        '"h": {"type": "null"}}, "required": ["a", "b", "c", "d", "e"], '
        '"additionalProperties": false}'
    )

    def bare() -> str:
        return ""

    assert FunctionTool(bare).definition.parameters_json == (
        '{"type": "object", "properties": {}, "required": [], "additionalProperties": false}'
    )


def test_bad_options_and_names_twice_are_rejected():
    for options in ({"timeout_s": 0}, {"max_calls": 0}, {"tool_failures": "ignore"}):
        with pytest.raises(InvalidConfig):
            ToolUse([search], **options)
    with pytest.raises(InvalidConfig):
        ToolUse([search, FunctionTool(double, name="search")])


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_tools_need_history_mode(mode):
    with pytest.raises(InvalidConfig) as caught:
        ChatEnv(name="x", transforms=(ToolUse([search]),), input_mode=mode)
    assert caught.value.reason == "HISTORY_MODE_ONLY"


async def test_a_message_without_a_call_can_end_the_episode():
    ending = EndWithoutCalls(BlockCalls())
    ended = await ending.step(outcome_of(policy_message("done")))
    assert ended.episode.done_reason is DoneReason.NO_CALL
    assert not (
        await ending.step(outcome_of(policy_message("<tool>search\n{}</tool>")))
    ).episode.done
