from __future__ import annotations

import base64

import pytest
from dialoop.chat import (
    ChatHistory,
    ContentPart,
    Histories,
    History,
    Message,
    ToolCall,
    ToolDefinition,
)
from dialoop.errors import InvalidHistory, Unsupported
from dialoop.messages import chat_for_template, content_part, tool_for_template
from dialoop.wire.messages import HISTORY

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  3}'}}
ASSISTANT = {
    "role": "assistant",
    "content": "Let me.",
    "reasoning_content": "3 and 4",
    "tool_calls": [CALL],
    "is_complete": False,
}
PARTS = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(b"\x00\xff").decode(), "format": "wav"},
    },
    {
        "type": "file",
        "url": "https://x/y.pdf",
        "mime_type": "application/pdf",
        "name": "y",
        "size": 7,
    },
    {"type": "function_call", "function_name": "f", "function_arguments_json": "{}"},
    {"type": "video", "data": "AAA=", "mime_type": "video/mp4"},
]
CHATS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": PARTS, "name": "ann"},
    ASSISTANT,
    {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    {"role": "tool", "content": "", "tool_responses": ["7", ""]},
]


def test_chat_dicts_lose_nothing_in_either_direction():
    history = History.from_chats(CHATS)
    assert history.to_chats() == CHATS
    assert History.from_chats(history.to_chats()) == history
    assert HISTORY.from_proto(HISTORY.to_proto(history)) == history


def test_arguments_as_an_object_become_json_text_with_unicode():
    call = {"name": "add", "arguments": {"a": 3, "b": "ä"}}
    (tool_call,) = Message.from_chat({"role": "assistant", "tool_calls": [call]}).tool_calls
    assert tool_call == ToolCall(name="add", arguments_json='{"a": 3, "b": "ä"}')


def test_templates_get_arguments_as_an_object_or_as_the_model_wrote_them():
    calls = tuple(ToolCall(name="f", arguments_json=text) for text in ('{"a": 3}', "{oops", '"x"'))
    chat = chat_for_template(Message(role="assistant", tool_calls=calls))
    arguments = [call["function"]["arguments"] for call in chat["tool_calls"]]
    assert arguments == [{"a": 3}, "{oops", '"x"']


def test_text_parts_are_joined_and_others_refused_by_the_text_renderer():
    texts = (ContentPart(type="text", text="a"), ContentPart(type="text", text="b"))
    assert chat_for_template(Message(role="user", content=texts))["content"] == "ab"
    image = (ContentPart(type="image", url="u"),)
    with pytest.raises(Unsupported) as caught:
        chat_for_template(Message(role="user", content=image))
    assert caught.value.reason == "PARTS_UNSUPPORTED"


def test_placeholders_of_rectangular_batches_are_dropped():
    chats = [{"role": "user", "content": "hi"}, {"role": "<none>", "content": ""}]
    assert len(History.from_chats(chats)) == 1


def test_a_single_message_is_promoted_with_a_warning():
    with pytest.warns(UserWarning, match="single message"):
        history = History.from_chats({"role": "user", "content": "hi"})
    assert history == History((Message(role="user", content="hi"),))
    with pytest.warns(UserWarning, match="prompt is a single message"):
        assert ChatHistory(prompt=history[0]).prompt == history


def test_nested_chats_are_histories_of_their_own_lengths():
    histories = History.from_chats([CHATS[:1], CHATS[:4], []])
    assert isinstance(histories, Histories)
    assert [len(history) for history in histories] == [1, 4, 0]
    assert histories.to_chats() == [CHATS[:1], CHATS[:4], []]
    assert histories[:1] == Histories((histories[0],))
    hello = Message(role="user", content="hello")
    longer = histories.append([hello] * 3)
    assert [len(history) for history in longer] == [2, 5, 1]
    assert [len(history) for history in histories] == [1, 4, 0]
    with pytest.raises(InvalidHistory):
        histories.append([hello])


def test_histories_are_values():
    """The reference appends in place: a branch shows up in its sibling."""
    prompt = History.from_chats([{"role": "user", "content": "hi"}])
    left = prompt.append(Message(role="assistant", content="a"))
    right = prompt.append(Message(role="assistant", content="b"))
    assert (len(prompt), left[1].text, right[1].text) == (1, "a", "b")
    assert left[:1] == prompt == right[:1]
    assert hash(left[:1]) == hash(prompt)


@pytest.mark.parametrize(
    ("chat", "named"),
    [
        ({"content": "x"}, r"messages\[0\].role: expected a string, found nothing"),
        ({"role": 3, "content": "x"}, r"role: expected a string, found int 3"),
        (
            {"role": "user", "content": 7},
            "content: expected a string or a list of parts, found int",
        ),
        ({"role": "user", "content": ["hi"]}, r"content\[0\]: expected a content part"),
        ({"role": "user", "content": [{"text": "x"}]}, r"content\[0\].type: expected a string"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text: expected a string"),
        ({"role": "user", "content": [{"type": "image", "hue": 1}]}, "field 'hue'"),
        (
            {"role": "user", "content": [{"type": "image", "data": "?"}]},
            r"content\[0\].data: expected base64",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}],
            },
            "detail is 'low'",
        ),
        ({"role": "user", "is_complete": "yes"}, "is_complete: expected true or false"),
        ({"role": "user", "tool_calls": "add"}, "tool_calls: expected a list, found str"),
        ({"role": "user", "tool_calls": [{"function": {}}]}, "function.name: expected a string"),
        (
            {"role": "user", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "arguments: expected JSON text or a dict, found list",
        ),
        (
            {"role": "user", "tool_responses": [7]},
            r"tool_responses\[0\]: expected a string, found int",
        ),
        ({"role": "user", "weight": 1}, "field 'weight'"),
    ],
)
def test_a_wrong_or_missing_field_is_named_with_what_was_expected_and_found(chat, named):
    with pytest.raises(InvalidHistory, match=named):
        History.from_chats([chat])


def test_something_that_is_no_message_is_named():
    with pytest.raises(
        InvalidHistory, match=r"messages\[1\]: expected a message .* found str 'hi'"
    ):
        History.from_chats([CHATS[0], "hi"])


@pytest.mark.parametrize("make", [content_part, ContentPart])
def test_a_content_part_of_an_unknown_type_is_refused(make):
    with pytest.raises(InvalidHistory, match="no content part of type 'imgae'") as caught:
        make(type="imgae", url="u")
    assert caught.value.reason == "UNKNOWN_PART_TYPE"
    assert "'image'" in caught.value.remedy


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_a_function_call_part_takes_the_documents_name_of_its_arguments(arguments):
    part = {"type": "function_call", "function_name": "f", "function_args": arguments}
    (read,) = Message.from_chat({"role": "assistant", "content": [part]}).content
    assert read == content_part(**part)
    assert read.function_arguments_json == '{"a": 1}'
    with pytest.raises(InvalidHistory, match="an object or JSON text"):
        content_part(type="function_call", function_args=[1])
    with pytest.raises(InvalidHistory, match="function_args and function_arguments_json"):
        content_part(**part, function_arguments_json="{}")


def test_empty_fields_that_chat_apis_send_are_no_error():
    chat = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    assert Message.from_chat(chat) == Message(role="assistant")


def test_a_tool_whose_parameters_are_no_json_is_refused():
    with pytest.raises(InvalidHistory) as caught:
        tool_for_template(ToolDefinition(name="f", parameters_json="{"))
    assert caught.value.reason == "TOOL_INVALID"
