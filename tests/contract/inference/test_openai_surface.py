"""OpenAI's routes: what may be asked, what is refused and how, and streams that say the same."""

from __future__ import annotations

import asyncio
import gzip
import json

import openai
import pytest
from openapi_spec_validator import validate

from tests.support.agent_world import (
    MODEL,
    TOOL_TEMPLATE,
    ScriptedEngine,
    agent_world,
    call_text,
    make_tool_model,
)
from tests.support.waiting import PATIENCE_S

USER = {"role": "user", "content": "What is 3+4?"}
CHAT = {"model": MODEL, "messages": [USER]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TWO_CALLS = f"Let me see.\n{call_text('add', a=1)}\n{call_text('add', a=2)}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


def assert_refused(answer, status: int, code: str, *words: str) -> None:
    """An error in OpenAI's words that names what is wrong."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"]
    for word in words:
        assert word in error["message"]


async def chunks_of(stream) -> list:
    return [chunk async for chunk in stream]


async def test_an_answer_has_the_shape_of_openai(directory):
    engine = ScriptedEngine(directory, ["Seven."])
    async with agent_world(directory, engine) as world:
        answer = await world.client().chat.completions.create(**CHAT)
        assert answer.object == "chat.completion"
        assert answer.model == MODEL
        assert answer.system_fingerprint == "base-0"
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", "Seven.")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is None
        usage = answer.usage
        assert usage.prompt_tokens == len(engine.log[0].prompt_ids)
        assert usage.completion_tokens == len(engine.log[0].token_ids)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("off", [0, -1])
async def test_a_top_k_that_is_off_is_taken(directory, off):
    async with agent_world(directory, ScriptedEngine(directory, ["Seven."])) as world:
        answer = await world.client().chat.completions.create(**CHAT, extra_body={"top_k": off})
        assert answer.choices[0].message.content == "Seven."


async def test_the_prompt_is_the_template_with_its_tools(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Seven."])
    async with agent_world(directory, engine) as world:
        client = world.client()
        await client.chat.completions.create(**CHAT, tools=[ADD])
        shown = world.tokenizer.decode(engine.log[0].prompt_ids)
        assert '"name": "add"' in shown
        assert shown.endswith("What is 3+4?<|im_end|>\n<|im_start|>assistant\n")
        await client.chat.completions.create(**CHAT, tools=[ADD], tool_choice="none")
        assert "add" not in world.tokenizer.decode(engine.log[1].prompt_ids)


async def test_parallel_tool_calls_are_parsed(directory):
    async with agent_world(directory, ScriptedEngine(directory, [TWO_CALLS] * 2)) as world:
        answer = await world.client().chat.completions.create(**CHAT, tools=[ADD])
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = choice.message.tool_calls
        assert [c.function.arguments for c in calls] == ['{"a": 1}', '{"a": 2}']
        assert len({c.id for c in calls}) == 2
        untold = await world.client().chat.completions.create(**CHAT)
        assert untold.choices[0].message.content == TWO_CALLS  # no tools were offered
        assert untold.choices[0].finish_reason == "stop"


async def test_one_call_at_most_where_parallel_calls_are_off(directory):
    engine = ScriptedEngine(directory, [TWO_CALLS])
    async with agent_world(directory, engine) as world:
        answer = await world.client().chat.completions.create(
            **CHAT, tools=[ADD], parallel_tool_calls=False
        )
        assert [c.function.arguments for c in answer.choices[0].message.tool_calls] == ['{"a": 1}']
        assert world.tokenizer.decode(engine.log[0].token_ids).endswith("</tool_call>")


@pytest.mark.parametrize(
    "text",
    [
        "Seven, as <tool_callers know.",
        "émoji 😀 and 世界",
        TWO_CALLS,
        call_text("add", a=1) + " and more",
        "<tool_call>\nnot json\n</tool_call> after",
        "<tool_call>\n{'name': 3}",
        "\n\n spaces \n",
        "stop HERE and no further",
    ],
)
@pytest.mark.parametrize("num", [1, 2])
async def test_a_stream_adds_up_to_the_whole_answer(directory, text, num):
    engine = ScriptedEngine(directory, [text] * (2 * num))
    body = {**CHAT, "tools": [ADD], "n": num, "stop": ["HERE"], "logprobs": True}
    async with agent_world(directory, engine) as world:
        client = world.client()
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        chunks = await chunks_of(stream)
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        content = "".join(part.delta.content or "" for part in parts)
        assert content == (choice.message.content or "")
        calls = [call for part in parts for call in part.delta.tool_calls or []]
        streamed = [(c.function.name, c.function.arguments) for c in calls]
        wanted = choice.message.tool_calls or []
        assert streamed == [(c.function.name, c.function.arguments) for c in wanted]
        assert [call.index for call in calls] == list(range(len(wanted)))
        reasons = [part.finish_reason for part in parts if part.finish_reason]
        assert reasons == [choice.finish_reason]
        tokens = [t.token for p in parts if p.logprobs for t in p.logprobs.content]
        assert tokens == [t.token for t in choice.logprobs.content]
        assert parts[0].delta.role == "assistant"
        assert "HERE" not in content


async def test_a_stream_tells_tokens_as_they_come(directory):
    gate = asyncio.Semaphore(2)
    engine = ScriptedEngine(directory, ["one two three"], gate=gate)
    async with agent_world(directory, engine) as world:
        stream = await world.client().chat.completions.create(**CHAT, stream=True)
        first = await anext(aiter(stream))
        assert first.choices[0].delta.content
        assert engine.num_running == 1
        await stream.close()
        async with asyncio.timeout(PATIENCE_S):
            while engine.num_running:  # who leaves frees the slot
                await asyncio.sleep(0.01)


async def test_a_stream_that_breaks_ends_with_its_error(directory):
    engine = ScriptedEngine(
        directory,
        ["one two"],
        fails=lambda _: RuntimeError("secret"),
        gate=asyncio.Semaphore(9),
    )
    async with agent_world(directory, engine) as world:
        stream = await world.client().chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError) as caught:
            await chunks_of(stream)
    assert "Internal error" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_plain_completions_take_text_ids_and_lists(directory):
    engine = ScriptedEngine(directory, ["4"] * 6)
    async with agent_world(directory, engine) as world:
        client = world.client()
        answer = await client.completions.create(
            model=MODEL,
            prompt="2+2=",
            logprobs=0,
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0]
        assert choice.text == "4"
        assert choice.finish_reason == "stop"
        assert choice.logprobs.tokens == ["4", "<|im_end|>"]
        assert choice.logprobs.text_offset == [0, 1]
        assert choice.logprobs.top_logprobs is None
        raw = answer.model_dump()
        assert tuple(raw["prompt_token_ids"]) == engine.log[0].prompt_ids
        assert tuple(raw["choices"][0]["token_ids"]) == engine.log[0].token_ids
        several = await client.completions.create(model=MODEL, prompt=[[5, 6], [7]], n=2)
        assert [c.index for c in several.choices] == [0, 1, 2, 3]
        assert sorted(s.prompt_ids for s in engine.log[1:]) == [(5, 6), (5, 6), (7,), (7,)]
        stream = await client.completions.create(model=MODEL, prompt="2+2=", stream=True)
        assert "".join(c.choices[0].text for c in await chunks_of(stream)) == "4"


async def test_sampling_is_what_was_asked(directory):
    engine = ScriptedEngine(directory, [20, "x", "x"])
    async with agent_world(directory, engine) as world:
        client = world.client()
        answer = await client.chat.completions.create(**CHAT, max_tokens=3, max_completion_tokens=9)
        assert answer.usage.completion_tokens == 3  # the old name wins
        assert "max_completion_tokens 9 was not" in answer.model_dump()["warnings"][0]
        assert answer.choices[0].finish_reason == "length"
        greedy = await client.chat.completions.create(
            **CHAT, temperature=0, logprobs=True, top_logprobs=1
        )
        token = greedy.choices[0].logprobs.content[0]
        assert token.top_logprobs[0].token == token.token == "x"
        kept = await client.chat.completions.create(
            **CHAT, stop="x", extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].message.content == "x"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": None}, ["messages: expected a value, found none"]),
        ({"messages": []}, ["messages"]),
        ({"messages": "hi"}, ["messages: expected a valid array, found a string"]),
        (
            {"messages": [{"role": "user", "content": 3}]},
            ["messages.0.content: expected a valid string or a valid array, found an integer"],
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["messages.0.role", "'assistant'"]),
        ({"messages": [{"role": "user"}]}, ["messages.0: expected content, found none"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["expected tool_call_id"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ["messages.0.content.0.type: expected 'text', found a string"],
        ),
        ({"temperature": "hot"}, ["temperature: expected a valid number, found a string"]),
        ({"temperature": -1}, ["temperature: expected greater than or equal to 0"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"n": 1000}, ["n: expected less than or equal to 128, found an integer"]),
        ({"stream": "yes"}, ["stream: expected a valid boolean, found a string"]),
        ({"logit_bias": {"3": 1}}, ["logit_bias: this field is not supported"]),
        ({"presence_penalty": 0.5}, ["presence_penalty: 0.5", "repetition_penalty"]),
        ({"frequency_penalty": -1}, ["frequency_penalty: -1", "the distribution that was sampled"]),
        ({"logprobs": True, "top_logprobs": 2}, ["top_logprobs"]),
        ({"logprobs": True, "top_logprobs": 1, "temperature": 1.0}, ["temperature 0"]),
        ({"top_logprobs": 1, "temperature": 0}, ["logprobs is not true"]),
        ({"stop": [""]}, ["stop string is empty"]),
        ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs.messages"]),
    ],
)
async def test_a_wrong_field_says_what_was_expected_and_found(world, change, words):
    answer = await world.post("/v1/chat/completions", CHAT | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


@pytest.fixture
async def world(directory):
    async with agent_world(directory, ScriptedEngine(directory, ["Seven."] * 50)) as world:
        yield world


async def test_harmless_fields_and_nulls_change_nothing(world):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "presence_penalty": 0,
        "logit_bias": None,
        "response_format": {"type": "text"},
    }
    answer = await world.post("/v1/chat/completions", CHAT | harmless)
    assert answer.status_code == 200, answer.text


async def test_bad_bodies_are_refused(world):
    path = "/v1/chat/completions"
    assert_refused(await world.post(path, b"{"), 400, "invalid_json")
    assert_refused(await world.post(path, b"[1]"), 400, "invalid_field", "the body", "a list")
    plain = {"content-type": "text/plain"}
    assert_refused(await world.post(path, b"{}", headers=plain), 415, "unsupported_media_type")
    zipped = {"content-encoding": "gzip"}
    body = gzip.compress(json.dumps(CHAT).encode())
    assert (await world.post(path, body, headers=zipped)).status_code == 200
    assert_refused(await world.post(path, b"no gzip", headers=zipped), 400, "bad_gzip")
    assert_refused(
        await world.post(path, CHAT | {"model": "gpt"}), 404, "model_not_found", "'tiny'"
    )
    lone = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert (await world.post(path, lone)).status_code in (200, 400)


async def test_a_body_above_the_limit_is_refused(directory):
    engine = ScriptedEngine(directory, ["Seven."])
    async with agent_world(directory, engine, max_message_bytes=2000) as world:
        large = CHAT | {"messages": [USER | {"content": "x" * 3000}]}
        answer = await world.post("/v1/chat/completions", large)
        assert_refused(answer, 413, "message_too_large")
        bomb = gzip.compress(json.dumps(large).encode())
        answer = await world.post(
            "/v1/chat/completions", bomb, headers={"content-encoding": "gzip"}
        )
        assert_refused(answer, 413, "message_too_large")


async def test_the_guard_refuses_in_openais_words(directory):
    engine = ScriptedEngine(directory, ["Seven."] * 2)
    async with agent_world(directory, engine, token="right") as world:
        with pytest.raises(openai.AuthenticationError):
            await world.client(api_key="wrong").chat.completions.create(**CHAT)
        await world.client().chat.completions.create(**CHAT)
        headers = {"authorization": "Bearer right", "origin": "https://elsewhere.example"}
        foreign = await world.post("/v1/chat/completions", CHAT, headers=headers)
        assert_refused(foreign, 403, "foreign_origin")


async def test_without_a_token_any_api_key_will_do(world):
    client = await world.start_recording(sampling=None)
    assert (await client.chat.completions.create(**CHAT)).choices
    foreign = await world.post(
        "/recordings/r/v1/chat/completions", CHAT, headers={"origin": "http://evil.example"}
    )
    assert_refused(foreign, 403, "foreign_origin")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("responses", 'set_default_openai_api("chat_completions")'),
        ("messages", "a client of OpenAI's Chat Completions"),
    ],
)
@pytest.mark.parametrize("base", ["/v1/", "/recordings/r/v1/"])
async def test_what_agents_call_by_default_is_answered_with_what_to_use(world, base, path, remedy):
    """openai-agents asks for Responses by default, and Anthropic's SDK for Messages."""
    answer = await world.post(f"{base}{path}", {"model": "tiny", "input": "hi"})
    assert (answer.status_code, answer.json()["reason"]) == (404, "ROUTE_NOT_FOUND")
    assert remedy in answer.json()["remedy"]


async def test_models_are_listed(world):
    client = world.client()
    (model,) = (await client.models.list()).data
    assert model.id == MODEL
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")


async def test_calls_are_counted_and_documented(world):
    await world.post("/v1/chat/completions", CHAT)
    await world.post("/v1/chat/completions", {})
    text = (await world.http.get(f"{world.url}/metrics")).text
    line = 'dialoop_calls_total{door="rest",rpc="OpenAI.ChatCompletions",status="%s"} 1.0'
    assert line % "OK" in text
    assert line % "INVALID_ARGUMENT" in text
    document = (await world.http.get(f"{world.url}/openapi.json")).json()
    validate(document)
    for path in ("/v1/chat/completions", "/recordings/{recording_id}/v1/completions"):
        assert "post" in document["paths"][path]


@pytest.mark.parametrize("unread", ["", "{# no tools #}", "{% if tools %}{% endif %}"])
async def test_a_template_without_tools_refuses_them(unread, tmp_path):
    directory = make_tool_model(tmp_path / "model")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    assert config["chat_template"] == TOOL_TEMPLATE
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    path.write_text(json.dumps(config | {"chat_template": unread + plain}), encoding="utf-8")
    async with agent_world(directory, ScriptedEngine(directory, ["x"])) as world:
        answer = await world.post("/v1/chat/completions", CHAT | {"tools": [ADD]})
    assert_refused(answer, 400, "tools_unsupported", "the chat template shows none")
    assert answer.json()["error"]["param"] == "tools"
