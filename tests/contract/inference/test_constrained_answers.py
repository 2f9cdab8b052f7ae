"""`response_format` and forced calls: done by engines that can, refused by others with a reason."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import openai
import pytest
import torch
from dialoop.chat import History, Message
from dialoop.clients.inference import InferenceClient
from dialoop.errors import Unsupported
from dialoop.trajectory import Distribution, SamplingParams
from dialoop_services.inference.engine import EngineOptions

from tests.support.agent_world import (
    MODEL,
    ScriptedEngine,
    agent_world,
    call_text,
    make_tool_model,
)
from tests.support.inference_world import model_dir, world  # noqa: F401

USER = {"role": "user", "content": "What is 3+4?"}
CHAT = {"model": MODEL, "messages": [USER]}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [3, 7]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
LOOK = {"type": "function", "function": {"name": "look"}}
NAMED = {"type": "function", "function": {"name": "add"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TAG = {
    "begin": '<tool_call>\n{"name": "add", "arguments": ',
    "schema": SCHEMA,
    "end": "}\n</tool_call>",
}


@dataclass
class ConstrainedEngine(ScriptedEngine):
    """Keeps what it was to constrain its answers to; its script keeps to that."""

    constrains_answers: bool = True
    constraints: list[str] = field(default_factory=list)

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1):
        self.constraints.append(sampling.constraint)
        return await super().sample(prompt_ids, sampling, stop=stop, num_samples=num_samples)

    async def stream(self, prompt_ids, sampling, *, stop, on_tokens):
        self.constraints.append(sampling.constraint)
        return await super().stream(prompt_ids, sampling, stop=stop, on_tokens=on_tokens)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"type": "json_object"}, {"type": "json_object"}),
        (JSON_SCHEMA, {"type": "json_schema", "schema": SCHEMA}),
        ({"type": "text"}, None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_format_reaches_the_engine(directory, form, constraint, streams):
    engine = ConstrainedEngine(directory, ['{"a": 7}'])
    async with agent_world(directory, engine) as w:
        answer = await w.client().chat.completions.create(
            **CHAT, response_format=form, stream=streams
        )
        if streams:
            chunks = [chunk async for chunk in answer]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = answer.choices[0].message.content
        assert text == '{"a": 7}'
    assert [json.loads(c) if c else None for c in engine.constraints] == [constraint]


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "is_single"),
    [
        ("required", True, ["add", "look"], False),
        ("required", False, ["add", "look"], True),
        (NAMED, True, ["add"], False),
    ],
)
async def test_a_forced_call_is_a_form_of_the_answer(directory, choice, parallel, names, is_single):
    engine = ConstrainedEngine(directory, [call_text("add", a=7)])
    async with agent_world(directory, engine) as w:
        answer = await w.client().chat.completions.create(
            **CHAT, tools=[ADD, LOOK], tool_choice=choice, parallel_tool_calls=parallel
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 7}')
        assert answer.choices[0].finish_reason == "tool_calls"
    (constraint,) = map(json.loads, engine.constraints)
    assert (constraint["type"], constraint["is_single"]) == ("tagged", is_single)
    assert constraint["tags"][0] == TAG
    assert [tag["begin"].split('"')[3] for tag in constraint["tags"]] == names


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"response_format": JSON_SCHEMA}, "unsupported_response_format", "response_format: the"),
        (
            {"tools": [ADD], "tool_choice": "required"},
            "unsupported_tool_choice",
            "tool_choice: the",
        ),
        ({"tools": [ADD], "tool_choice": NAMED}, "unsupported_tool_choice", "tool_choice: the"),
    ],
)
async def test_an_engine_that_cannot_is_named_with_what_to_do(directory, change, code, words):
    async with agent_world(directory, ScriptedEngine(directory, ["Seven."])) as w:
        answer = await w.post("/v1/chat/completions", CHAT | change)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code)
        assert f"{words} engine scripted does not hold answers to a form" in error["message"]
        assert 'engine = "vllm"' in error["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice: there is no such tool"),
        ({"tools": [LOOK], "tool_choice": NAMED}, "tool_choice: there is no such tool"),
        ({"tools": [ADD], "response_format": JSON_SCHEMA}, "could call no tool"),
        (
            {"tools": [ADD], "tool_choice": NAMED, "response_format": JSON_SCHEMA},
            "cannot be a tool call and of that form",
        ),
        ({"response_format": {"type": "json_schema"}}, "expected json_schema with type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
async def test_a_request_that_contradicts_itself_says_how(directory, change, words):
    async with agent_world(directory, ConstrainedEngine(directory, ["x"])) as w:
        answer = await w.post("/v1/chat/completions", CHAT | change)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


async def test_a_recording_with_a_constrained_call_says_so_and_is_not_trained_on(directory):
    engine = ConstrainedEngine(directory, ["Seven.", '{"a": 7}'])
    async with agent_world(directory, engine) as w:
        client = await w.start_recording()
        await client.chat.completions.create(**CHAT)
        await client.chat.completions.create(**CHAT, response_format=JSON_SCHEMA)
        trajectory = await w.recordings.close("r")
    assert json.loads(trajectory.sampling.constraint)["schema"] == SCHEMA
    assert trajectory.sampling.alters
    assert trajectory.sampling.distribution is Distribution.PROCESSED


async def test_transformers_refuses_a_constraint_by_name(model_dir, tmp_path):
    question = History((Message(role="user", content="35+40"),))
    async with world(model_dir, tmp_path / "w") as w:
        client: InferenceClient = w.client
        sampling = SamplingParams(constraint='{"type": "json_object"}')
        with pytest.raises(Unsupported, match="does not hold answers to a form"):
            await client.generate(question, sampling=sampling)


@pytest.mark.heavy(reason="starts vLLM")
@pytest.mark.timeout(480)
async def test_vllm_holds_answers_to_their_form(directory):
    """The model is random, so nothing but the constraint makes its answers JSON."""
    pytest.importorskip("vllm")
    from dialoop_services.inference.vllm_engine.environment import Vllm

    options = EngineOptions(max_model_len=1024, max_num_seqs=8)
    with torch.random.fork_rng(devices=[]):
        engine = await Vllm.start(directory, options)
    try:
        async with agent_world(directory, engine) as w:
            create = w.client().chat.completions.create
            answer = await create(**CHAT, n=4, max_tokens=200, response_format=JSON_SCHEMA)
            for choice in answer.choices:
                assert choice.finish_reason == "stop"
                assert json.loads(choice.message.content)["a"] in (3, 7)
            answer = await create(**CHAT, max_tokens=200, tools=[ADD], tool_choice=NAMED)
            for call in answer.choices[0].message.tool_calls:
                assert call.function.name == "add"
                assert json.loads(call.function.arguments)["a"] in (3, 7)
            single = {"tool_choice": "required", "parallel_tool_calls": False}
            look = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
            answer = await create(**CHAT, max_tokens=200, tools=[ADD, look], **single)
            assert len(answer.choices[0].message.tool_calls) == 1
            free = await create(**CHAT, max_tokens=20)
            assert free.choices[0].message.tool_calls is None
            bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
            with pytest.raises(openai.BadRequestError, match="more than the engine can follow"):
                await create(**CHAT, response_format=bad)
            assert (await create(**CHAT, max_tokens=5)).choices
    finally:
        await engine.close()
