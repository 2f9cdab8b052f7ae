"""Answers of several families at the OpenAI server: the same calls whole and streamed."""

from __future__ import annotations

import json

import pytest
from dialoop.answers import grammar_of
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.tokenizer import Tokenizer

from tests.support.agent_world import MODEL, ScriptedEngine, agent_world
from tests.support.families import FAMILIES, family

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
WRITE = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one?"}], "tools": [WRITE]}
ARGUMENTS = {"text": "see </tool_call> here", "n": 3}
ANSWERS = {
    "qwen3": "<think>\nA </think>So.\n<tool_call>\n"
    f'{{"name": "write", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>',
    "qwen3_5": "A </think>So.\n<tool_call>\n<function=write>\n<parameter=text>\nsee </tool_call> "
    "here\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm4_5": "<think>A </think>So.\n<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>see "
    "</tool_call> here</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grammar_of_a_published_template_is_known(name):
    known = family(name)
    tokenizer = Tokenizer.from_directory(known.directory)
    written = ChatTemplate.of(tokenizer).profile.written_call
    assert grammar_of(written) == known.grammar


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_closing_tag_in_an_argument_is_text_whole_and_streamed(name):
    directory = family(name).directory
    engine = ScriptedEngine(directory, [ANSWERS[name]] * 2)
    async with agent_world(directory, engine) as world:
        completions = world.client().chat.completions
        choice = (await completions.create(**CHAT)).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("write", ARGUMENTS)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
        assert choice.message.reasoning_content == "A "
        deltas = [
            chunk.choices[0].delta
            async for chunk in await completions.create(**CHAT, stream=True)
            if chunk.choices
        ]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
    assert "".join(delta.content or "" for delta in deltas) == "So."


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_where_parallel_calls_are_off_an_answer_ends_with_its_whole_first_call(name, stream):
    directory, first = family(name).directory, ANSWERS[name]
    second = first.partition("So.")[2]
    engine = ScriptedEngine(directory, [first + second])
    async with agent_world(directory, engine) as world:
        body = CHAT | {"parallel_tool_calls": False, "stream": stream}
        answer = await world.client().chat.completions.create(**body)
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer if chunk.choices]
        else:
            deltas = [answer.choices[0].message]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
    (sampled,) = engine.log
    assert world.tokenizer.decode(sampled.token_ids) == first


async def test_where_parallel_calls_are_off_one_of_a_list_of_calls_is_shown():
    directory = family("lfm2_v2").directory
    engine = ScriptedEngine(directory, ["[write(n=1), write(n=2)] more"] * 2)
    async with agent_world(directory, engine) as world:
        completions = world.client().chat.completions
        single = await completions.create(**CHAT, parallel_tool_calls=False)
        several = await completions.create(**CHAT)
    shown = [
        [json.loads(call.function.arguments)["n"] for call in answer.choices[0].message.tool_calls]
        for answer in (single, several)
    ]
    assert shown == [[1], [1, 2]]
    assert world.tokenizer.decode(engine.log[0].token_ids).endswith(")]")


async def test_a_call_that_cannot_be_read_stays_content():
    directory, text = family("qwen3_5").directory, "</think><tool_call>{}</tool_call>"
    async with agent_world(directory, ScriptedEngine(directory, [text])) as world:
        choice = (await world.client().chat.completions.create(**CHAT)).choices[0]
    assert choice.message.content == text.removeprefix("</think>")
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


async def test_kimis_own_ids_are_given_since_its_template_writes_them_alone():
    directory = family("kimi_k2").directory
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
        '<|tool_call_argument_begin|>{"n": 3}<|tool_call_end|><|tool_calls_section_end|>'
    )
    async with agent_world(directory, ScriptedEngine(directory, [text] * 2)) as world:
        completions = world.client().chat.completions
        first = (await completions.create(**CHAT)).choices[0].message.tool_calls[0]
        past = [
            *CHAT["messages"],
            {"role": "assistant", "content": "", "tool_calls": [first.model_dump()]},
            {"role": "tool", "tool_call_id": first.id, "content": "done"},
        ]
        again = (await completions.create(**CHAT | {"messages": past})).choices[0]
    assert (first.id, first.function.name) == ("functions.write:0", "write")
    assert again.message.tool_calls[0].id.startswith("call_")


async def test_calls_of_other_forms_cannot_be_forced():
    directory = family("qwen3_5").directory
    engine = ScriptedEngine(directory, [])
    engine.constrains_answers = True
    async with agent_world(directory, engine) as world:
        answer = await world.post("/v1/chat/completions", CHAT | {"tool_choice": "required"})
    error = answer.json()["error"]
    assert error["code"] == "unsupported_tool_choice"
    assert "calls in the form xml" in error["message"]
