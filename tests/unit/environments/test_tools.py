"""Facts of call parsing (R-TE1), tools (R-TE2, R-TE6) and the calculator."""

import asyncio
import threading

import pytest
from dialoop.chat import History, Message, ToolCall
from dialoop.environments import (
    Calculator,
    Episode,
    Outcome,
    TaskData,
    ToolCalls,
    ToolInputError,
    ToolUse,
    parse_call,
)
from dialoop.environments.tools.text_tools import cut
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Owner

from tests.support.waiting import PATIENCE_S

TASK = TaskData(key="k", question="q", answer="1")


@pytest.mark.parametrize(
    ("text", "tool", "query"),
    [
        ("<request><Calculator>35+40<call>", "Calculator", "35+40"),
        ("I will. <request><T>q<call> and on", "T", "q"),
        ("<request><T>a>b<call>", "T", "a>b"),
        ("<request>please <T>q<call>", "T", "q"),
        ("<request><>q<call>", "", "q"),
        ("<request><T><call>", "T", ""),
        ("<request><T>two\nlines<call>", "T", "two\nlines"),
        ("<request><A>1<call><request><B>2<call>", "A", "1"),
        ("<T>q<call>", None, None),
        ("<request><T>q", None, None),
        ("<call><request><T>q", None, None),
        ("<request>|T|q<call>", None, None),
        ("random text", None, None),
        ("", None, None),
    ],
)
def test_calls_are_parsed(text, tool, query):
    assert parse_call(text) == (tool, query)


async def answer(tools, text: str, **options) -> Outcome:
    message = Message(role="assistant", content=text)
    episode = Episode(task=TASK, seed=0, history=History((message,)), step_index=1, answer=message)
    return await ToolCalls(tools, **options).step(
        Outcome(episode=episode, response=History((message,)))
    )


def answers_of(outcome: Outcome) -> list[str]:
    return [m.text for m in outcome.episode.history[1:]]


async def async_upper(query: str) -> str:
    await asyncio.sleep(0)
    return query.upper()


class Number:
    def __call__(self, query: str) -> int:
        return int(query) * 2


async def test_tools_may_be_functions_objects_sync_or_async():
    tools = [async_upper, Number(), Calculator()]
    assert answers_of(await answer(tools, "<request><async_upper>a<call>")) == ["A<response>"]
    assert answers_of(await answer(tools, "<request><Number>4<call>")) == ["8<response>"]
    assert answers_of(await answer(tools, "<request><Calculator>4/2<call>")) == ["2<response>"]
    assert answers_of(await answer({"x": Number()}, "<request><x>1<call>")) == ["2<response>"]


async def test_the_role_of_tool_messages_can_be_chosen():
    outcome = await answer([Number()], "<request><Number>1<call>", role="user")
    assert outcome.episode.history[-1].role == "user"


async def test_every_call_of_a_message_is_run_up_to_a_limit():
    text = "".join(f"<request><Number>{i}<call>" for i in range(3))
    assert answers_of(await answer([Number()], text)) == [
        "0<response>",
        "2<response>",
        "4<response>",
    ]
    limited = await answer([Number()], text, max_calls=2)
    assert answers_of(limited)[-1] == "Too many calls.<response>"
    assert limited.num_tool_calls == 2


async def test_unknown_tools_and_malformed_calls_get_a_text_and_count_no_call():
    unknown = await answer([Number()], "<request><X>1<call>")
    assert answers_of(unknown) == ["Unknown tool X.<response>"]
    assert answers_of(await answer([Number()], "<request>|X|1<call>")) == [
        "Unknown tool call.<response>"
    ]
    assert unknown.num_tool_calls == 0
    assert not unknown.failures


async def test_a_query_that_makes_no_sense_is_the_policys_mistake():
    outcome = await answer([Calculator()], "<request><Calculator>1+<call>")
    assert answers_of(outcome) == ["Tool error: the expression is not complete.<response>"]
    assert not outcome.failures
    assert not outcome.episode.done


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("secret")


def crash(query: str) -> str:
    raise RuntimeError("secret")


def leave(query: str) -> str:
    raise SystemExit(3)


def run_dry(query: str) -> str:
    return next(iter(()))


@pytest.mark.parametrize("tool", [crash, leave, run_dry, lambda query: Unprintable()])
async def test_a_crashing_tool_is_a_failure_and_ends_the_episode(tool):
    outcome = await answer({"t": tool}, "<request><t>1<call><request><t>2<call>")
    (failure,) = outcome.failures
    assert (failure.owner, failure.reason) == (Owner.TOOL, "TOOL_FAILED")
    assert "secret" not in failure.message
    assert outcome.episode.truncated
    assert outcome.episode.done_reason is DoneReason.ERROR
    assert answers_of(outcome) == []


RELEASED = threading.Event()


@pytest.fixture
def release_event():
    """Lets hanging tools go once the test has seen that nobody waits for them."""
    RELEASED.clear()
    yield
    RELEASED.set()


def hang(query: str) -> str:
    RELEASED.wait(600)
    return "late"


async def async_hang(query: str) -> str:
    await asyncio.sleep(600)
    return "late"


@pytest.mark.usefixtures("release_event")
@pytest.mark.parametrize("tool", [hang, async_hang])
async def test_a_hanging_tool_is_a_failure_after_its_timeout(tool):
    outcome = await answer({"t": tool}, "<request><t>1<call>", timeout_s=0.05)
    assert outcome.failures[0].reason == "TOOL_TIMEOUT"


@pytest.mark.usefixtures("release_event")
async def test_half_a_character_in_a_tools_answer_is_the_tools_failure():
    def half(query: str) -> str:
        """Cut a character."""
        return f"{query}\ud800"

    call = ToolCall(name="half", arguments_json='{"query": "1"}')
    for tools, message in (
        (ToolCalls([half]), Message(role="assistant", content="<request><half>1<call>")),
        (ToolUse([half]), Message(role="assistant", tool_calls=(call,))),
    ):
        episode = Episode(task=TASK, seed=0, history=History((message,)), answer=message)
        outcome = await tools.step(Outcome(episode=episode, response=History((message,))))
        (failure,) = outcome.failures
        assert failure.owner is Owner.TOOL
        assert "half a character, '\\ud800'" in failure.message


async def test_many_hanging_sync_tools_hold_up_nobody():
    slow = [answer({"t": hang}, "<request><t>1<call>", timeout_s=0.2) for _ in range(40)]
    quick = answer([Number()], "<request><Number>1<call>", timeout_s=PATIENCE_S)
    *_, last = await asyncio.gather(*slow, quick)
    assert answers_of(last) == ["2<response>"]


async def test_tool_text_is_cut_before_the_marker_is_added():
    tools = {"t": lambda query: "abcdefghij"}
    outcome = await answer(tools, "<request><t>1<call>", max_tool_response=5)
    assert answers_of(outcome) == ["ab...<response>"]


@pytest.mark.parametrize(("limit", "text"), [(9, "abcde"), (5, "abcde"), (4, "a..."), (2, "ab")])
def test_cut_text_is_never_longer_than_the_limit(limit, text):
    assert cut("abcde", limit) == text


def test_two_tools_of_one_name_are_rejected():
    with pytest.raises(InvalidConfig):
        ToolCalls([Number(), Number()])
    with pytest.raises(InvalidConfig):
        ToolCalls([Number()], max_tool_response=0)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("35+40", "75"),
        (" 35 + 40 ", "75"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("8/2/2", "2"),
        ("-3+-2", "-5"),
        ("+4", "4"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("1.5*2", "3"),
        (".5+1.", "1.5"),
        ("007+1", "8"),
        ("99999999999999999999*10", "999999999999999999990"),
    ],
)
def test_the_calculator_calculates(query, value):
    assert Calculator()(query) == value


@pytest.mark.parametrize(
    "query",
    [
        *("", "1+", "(1", "1)", "1 2", "()", "2**9", "a", "__import__('os')", "1e9", "1_0", "1,2"),
        *("1/0", "1/(2-2)", "1" * 101, "(" * 100, "٣+1", "1;2", "9" * 99 + "/", "-" * 100),
    ],
)
def test_the_calculator_refuses_what_makes_no_sense(query):
    with pytest.raises(ToolInputError):
        Calculator()(query)


def test_the_calculator_bounds_what_it_shows():
    long = Calculator(max_characters=2000)
    with pytest.raises(ToolInputError, match="too large"):
        long("9" * 400 + "/7")
