"""JSON within a field may be nested beyond Python's stack, or have a number of too many digits."""

from __future__ import annotations

import pytest
from dialoop.chat import Message, ToolCall, ToolDefinition
from dialoop.errors import InvalidHistory, InvalidInput
from dialoop.messages import chat_for_template, tool_for_template
from dialoop.templates.parsing import split_calls
from dialoop.tokens.special_tokens import _unescape
from dialoop_learning.lora.adapter_config import AdapterConfig
from dialoop_services.inference.requests import template_options_of

TEXTS = [
    pytest.param('{"a":' * 100_000 + "1" + "}" * 100_000, id="deep"),
    pytest.param('{"a":' + "1" * 5000 + "}", id="digits"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_python_cannot_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidHistory, match="not JSON"):
        tool_for_template(ToolDefinition(name="f", parameters_json=text))
    for read in (template_options_of, AdapterConfig.from_json):
        with pytest.raises(InvalidInput):
            read(text)


@pytest.mark.parametrize("text", TEXTS)
def test_arguments_of_a_model_stay_as_it_wrote_them(text: str) -> None:
    call = ToolCall(name="f", arguments_json=text)
    chat = chat_for_template(Message(role="assistant", tool_calls=(call,)))
    assert chat["tool_calls"][0]["function"]["arguments"] == text
    assert _unescape(text) == text
    content = f'<c>{{"name": "f", "arguments": {text}}}</c>'
    assert split_calls(content, "<c>", "</c>") == (content, ())
