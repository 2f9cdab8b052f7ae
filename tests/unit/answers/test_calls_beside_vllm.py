"""Calls in each family's text, read by Dialoop and by vLLM; each difference has its reason."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from dialoop.answers import AnswerForm, read_text
from dialoop.chat import ToolDefinition
from transformers import PreTrainedTokenizerFast

from tests.support.families.written import WRITERS, byte_vocabulary, marks_of

pytestmark = [pytest.mark.vllm, pytest.mark.heavy(reason="imports vLLM")]

PARSERS = {
    "hermes": "hermes",
    "xml": "qwen3_coder",
    "arg_key": "glm45",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi": "kimi_k2",
    "json": "llama3_json",
    "python_tag": "llama3_json",
    "pythonic": "pythonic",
    "llama4": "llama4_pythonic",
    "gemma4": "gemma4",
    "function_gemma": "functiongemma",
}
TAG = {"t": "see </tool_call> here"}
MIXED = {"t": "a", "n": -3, "b": False}
LIST, NONE = {"l": [1, "a"]}, {"o": {"k": None}}
ARGUMENTS: list[dict[str, Any]] = [
    *({}, {"t": "plain"}, {"t": "é 世\nline"}, {"t": "12"}, {"n": 12}, {"x": 1.5}, {"b": True}),
    *(LIST, NONE, MIXED, {"t": 'say "hi" {x}'}, TAG, {"t": "I'm"}, {"t": ""}, {"t": " a "}),
]
_TAG = "vLLM ends the call at the first closing tag, also in a string."
_NESTED = "vLLM makes text of a number or null within a list or an object."
_BARE = "vLLM reads texts alone, and one that is a number as a number."
DIFFERENCES = {
    ("hermes", str(TAG)): _TAG,
    ("arg_key", str(TAG)): _TAG,
    ("gemma4", str(LIST)): _NESTED,
    ("gemma4", str(NONE)): _NESTED,
    **{
        ("function_gemma", str(arguments)): _BARE
        for arguments in ({"t": "12"}, {"n": 12}, {"x": 1.5}, {"b": True}, LIST, NONE, MIXED)
    },
}
_TYPES = {"t": "string", "n": "integer", "x": "number", "b": "boolean", "l": "array", "o": "object"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("f", "g")]
OURS = [ToolDefinition(name=n, parameters_json=json.dumps(SCHEMA)) for n in ("f", "g")]


def read_by_vllm(parser: str, grammar: str, text: str) -> list[tuple[str, Any]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    message = {"role": "user", "content": "x"}
    request = ChatCompletionRequest(model="m", messages=[message], tools=TOOLS)
    made = byte_vocabulary(marks_of(grammar), ("<|im_end|>",))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    read = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)
    calls = read.extract_tool_calls(text, request).tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("way", PARSERS)
def test_calls_are_those_that_vllm_reads(way):
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    grammar, write = WRITERS[way]
    other = []
    for arguments in ARGUMENTS:
        calls = [("f", arguments), ("g", {"t": "plain"})]
        text = write(calls).lstrip("\n")  # its Python parsers take no content beside calls
        ours = read_text(text, AnswerForm(calls=grammar), OURS)
        assert [(c.name, json.loads(c.arguments_json)) for c in ours.calls] == calls
        if read_by_vllm(PARSERS[way], grammar, text) != calls:
            other.append(str(arguments))
    assert other == [text for name, text in DIFFERENCES if name == way]
