from __future__ import annotations

import pytest
from dialoop.chat import ChatHistory, ContentPart, History, Message, ToolCall, as_history
from dialoop.errors import InvalidHistory, PreconditionFailed

ASKED = ChatHistory(prompt=as_history("1+2"))
THREE = Message(role="assistant", content="3")


def test_respond_sets_response_and_full_together():
    answered = ASKED.respond(THREE)
    assert answered.response == History((THREE,))
    assert answered.require_full() == as_history("1+2").append(THREE)


def test_respond_without_prompt_names_what_is_missing():
    with pytest.raises(InvalidHistory) as caught:
        ChatHistory().respond(THREE)
    assert caught.value.reason == "PROMPT_MISSING"


def test_full_is_mandatory_after_a_policy():
    with pytest.raises(InvalidHistory) as caught:
        ASKED.require_full()
    assert caught.value.reason == "FULL_MISSING"


def test_a_response_alone_is_completed_with_the_prompt():
    completed = ChatHistory(response=History((THREE,))).completed_from(as_history("1+2"))
    assert completed == ASKED.respond(THREE)


@pytest.mark.parametrize("form", ["full", "prompt and response"])
def test_what_rewrites_the_prompt_is_refused(form):
    whole = ChatHistory(prompt=as_history("2+2")).respond(THREE)
    other = {
        "full": ChatHistory(full=whole.full),
        "prompt and response": ChatHistory(prompt=whole.prompt, response=whole.response),
    }[form]
    with pytest.raises(PreconditionFailed) as caught:
        other.completed_from(as_history("1+2"))
    assert caught.value.reason == "HISTORY_REWRITTEN"
    assert other.completed_from(as_history("2+2")) == whole


def test_an_absent_history_is_not_an_empty_one():
    assert ChatHistory().prompt is None
    assert ChatHistory(prompt=History()).require_prompt() == History()


def test_a_message_without_a_role_is_refused():
    with pytest.raises(InvalidHistory):
        Message(role="")


def test_chat_dicts_go_in_and_come_out():
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    assert History.from_chats(chats).to_chats() == chats
    assert Message.from_chat({"role": "assistant", "content": None}).text == ""


def test_tool_calls_show_in_a_chat_dict_with_arguments_as_text():
    call = ToolCall(id="c", name="add", arguments_json='{"a": 3}')
    chat = Message(role="assistant", tool_calls=(call,), tool_responses=("3",)).to_chat()
    assert chat["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert chat["tool_responses"] == ["3"]


def test_the_text_of_parts_is_that_of_the_text_parts():
    parts = (ContentPart(type="text", text="a"), ContentPart(type="image", url="u"))
    assert Message(role="user", content=parts).text == "a"


def test_a_slice_of_a_history_is_a_history():
    history = as_history("1+2").append(THREE)
    assert history[1] == THREE
    assert history[:1] == as_history("1+2")
    assert history.starts_with(history[:1])
    assert not history[:1].starts_with(history)
