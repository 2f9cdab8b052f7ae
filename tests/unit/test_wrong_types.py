"""A value of another type is promoted where its meaning is plain, and refused where it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dialoop import ChatEnv, arithmetic, play, play_group
from dialoop.chat import ChatHistory, Histories, History, Message
from dialoop.environments import MaxTurns, TaskData, Text, Tokens
from dialoop.errors import DialoopWarning, InvalidConfig, InvalidHistory, InvalidInput
from dialoop.messages import ContentPart, ToolCall
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy, byte_tokenizer
from dialoop.trajectory import SamplingParams, Task
from dialoop_extras.padding import pad_tokens, padded_rows

CHAT = {"role": "user", "content": "hi"}
HI = Message(role="user", content="hi")
ANSWER = Message(role="assistant", content="hello")
TASK = Task(task_id="t", environment="arithmetic", split="train", key="35+40")


def test_a_list_of_dicts_becomes_a_history_and_stays_as_it_was():
    chats = [CHAT]
    answered = ChatHistory(prompt=chats).respond(ANSWER)
    assert answered.require_full() == History((HI, ANSWER))
    assert chats == [CHAT]
    assert ChatHistory(prompt=[HI]).prompt == History([CHAT]) == History((HI,))


def test_a_history_takes_dicts_and_lists_of_messages():
    assert History().append(CHAT) == History().extend([CHAT]) == History((HI,))
    assert TaskData(key="k", messages=[CHAT]).messages == History((HI,))
    assert Histories([[CHAT], History((HI,))]).histories == (History((HI,)), History((HI,)))


def test_a_single_message_becomes_a_history_of_one_with_a_warning():
    for make in (lambda: History(HI), lambda: History(CHAT), lambda: History().extend(CHAT)):
        with pytest.warns(DialoopWarning, match="single message"):
            assert make() == History((HI,))


@pytest.mark.parametrize("wrong", ["abc", 3, [3], ["abc"], [None], {"content": "no role"}, [[HI]]])
@pytest.mark.parametrize(
    "make",
    [
        lambda wrong: History(wrong),
        lambda wrong: History().extend(wrong),
        lambda wrong: ChatHistory(prompt=wrong),
        lambda wrong: ChatHistory(full=wrong),
        lambda wrong: TaskData(key="k", messages=wrong),
    ],
)
@pytest.mark.filterwarnings("ignore::dialoop.errors.DialoopWarning")
def test_what_is_no_list_of_messages_is_no_history(make, wrong):
    with pytest.raises(InvalidHistory):
        make(wrong)


@pytest.mark.parametrize("wrong", ["abc", 3, None, [HI]])
def test_what_is_no_message_is_not_appended(wrong):
    with pytest.raises(InvalidHistory):
        History().append(wrong)
    with pytest.raises(InvalidHistory):
        ChatHistory(prompt=History()).respond(wrong)


@pytest.mark.parametrize("wrong", ["abc", HI, ["abc"], [HI]])
def test_what_is_no_list_of_histories_is_refused(wrong):
    with pytest.raises(InvalidHistory):
        Histories(wrong)


@pytest.mark.parametrize("role", ["assistent", "Assistant", "USER", "usr", "sytem", " user"])
def test_a_misspelt_role_is_refused_by_the_one_it_stands_for(role):
    with pytest.raises(InvalidHistory, match=r"Use '(assistant|user|system)'") as caught:
        Message(role=role)
    assert caught.value.reason == "UNKNOWN_ROLE"


@pytest.mark.parametrize("role", ["judge", "assistant_2", "ipython", "observation", "<none>"])
def test_a_role_of_ones_own_is_a_role(role):
    assert Message(role=role).role == role


@pytest.mark.parametrize(
    "fields",
    [
        {"role": 3},
        {"role": None},
        {"content": 3},
        {"content": [3]},
        {"is_complete": "yes"},
        {"reasoning": None},
        {"name": 3},
        {"tool_calls": "add"},
        {"tool_calls": [3]},
        {"tool_responses": "abc"},
        {"tool_responses": [3]},
    ],
)
def test_fields_of_a_message_have_their_types(fields):
    with pytest.raises(InvalidHistory):
        Message(**{"role": "user"} | fields)


def test_lists_in_a_message_become_tuples():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "hi"}]
    message = Message(role="user", content=parts, tool_calls=[call], tool_responses=["7"])
    assert message.content == (ContentPart(type="text", text="hi"),)
    assert message.tool_calls == (ToolCall(name="add", arguments_json='{"a": 1}'),)
    assert message.tool_responses == ("7",)
    assert hash(message) is not None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("return_tensors", "pt"),
        ("return_tensors", "nonsense"),
        ("padding", "max"),
        ("padding", 1),
        ("padding_side", "middle"),
        ("truncation", "yes"),
        ("tokenize", "yes"),
    ],
)
def test_an_option_of_the_chat_template_with_another_value_is_refused(option, value):
    with pytest.raises(InvalidInput, match=option) as caught:
        History((HI,)).apply_chat_template(byte_tokenizer(), **{option: value})
    assert caught.value.reason == "BAD_OPTIONS"


def test_padding_is_left_or_right():
    with pytest.raises(InvalidInput, match="padding_side"):
        pad_tokens([Tokens(full=(1,))], pad_token_id=0, padding_side="middle")
    with pytest.raises(InvalidInput, match="padding_side"):
        padded_rows(np.zeros((1, 1)), [1], padding_side="middle")


def test_text_is_text_and_ids_are_ids():
    assert Tokens(prompt=[1, 2]).prompt == (1, 2)
    assert Tokens(response=np.array([3])).response == (3,)
    for wrong in ({"prompt": ["a"]}, {"prompt": "ab"}, {"full": 3}, {"prompt": [0.5]}):
        with pytest.raises(InvalidHistory):
            Tokens(**wrong)
    with pytest.raises(InvalidHistory):
        Text(prompt=("a",))


@pytest.mark.parametrize(
    "fields", [{"temperature": "hot"}, {"top_k": [1]}, {"max_new_tokens": True}, {"stop": [3]}]
)
def test_sampling_has_numbers_and_texts(fields):
    with pytest.raises(InvalidInput):
        SamplingParams(**fields)


def test_one_stop_string_is_one():
    assert SamplingParams(stop="<call>").stop == ("<call>",)
    assert ChatEnv(name="e", stop="<call>").traits.stop == ("<call>",)


def test_transforms_are_transforms():
    assert ChatEnv(name="e", transforms=MaxTurns(2)).max_turns == 2
    with pytest.raises(InvalidConfig, match="no Transform"):
        ChatEnv(name="e", transforms=[len])


@pytest.mark.parametrize("player", [play, play_group])
@pytest.mark.parametrize(
    ("name", "wrong"), [("task", "arithmetic"), ("sessions", arithmetic()), ("policy", len)]
)
async def test_what_is_played_has_its_type(player: Any, name: str, wrong: Any):
    sessions, policy = InMemoryEnvironment(arithmetic()), ScriptedPolicy(["x"])
    arguments = {"task": TASK, "sessions": sessions, "policy": policy} | {name: wrong}
    if player is play_group:
        arguments["group_id"] = "g"
    with pytest.raises(InvalidInput, match=f"{name} is"):
        await player(arguments.pop("task"), **arguments)


def test_roles_and_contents_are_columns():
    history = History((HI, ANSWER))
    assert history.role == ("user", "assistant")
    assert history.content == ("hi", "hello")
    both = Histories((history, history[:1]))
    assert both.role == (("user", "assistant"), ("user",))
    assert both.content == (("hi", "hello"), ("hi",))
