"""The likeliest tokens of each position: over gRPC, REST, OpenAI's routes and their streams."""

from __future__ import annotations

import json

import pytest
from dialoop.clients.inference import InferenceClient
from dialoop.errors import InvalidInput, Unsupported
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

from tests.support.agent_world import MODEL, ScriptedEngine, agent_world
from tests.support.inference_world import QUESTION, assert_refused, model_dir  # noqa: F401
from tests.support.rest_world import http_of, service

NUM = 4
SAMPLING = {"top_logprobs": NUM, "temperature": 0.7, "seed": 5, "max_new_tokens": 8}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "35+40"}],
    "temperature": 0.7,
    "seed": 5,
    "max_tokens": 8,
}


@pytest.fixture
async def world(model_dir):
    engine = await TransformersEngine.start(model_dir, EngineOptions(max_model_len=200))
    try:
        async with agent_world(model_dir, engine) as w:
            yield w
    finally:
        await engine.close()


async def test_each_position_names_its_likeliest_tokens_over_grpc_and_rest(world):
    client = InferenceClient(world.channel)
    (sample,) = await client.generate(QUESTION, sampling=SamplingParams(**SAMPLING))
    tops = sample.top_logprobs
    ids = sample.sequence.token_ids[sample.sequence.response_mask()].tolist()
    own = sample.sequence.inference_logprobs.tolist()
    assert len(tops) == len(ids) == len(own) > 0
    for top, token_id, logprob in zip(tops, ids, own, strict=True):
        values = list(top.values())
        assert len(values) == NUM
        assert values == sorted(values, reverse=True)
        assert logprob <= values[0]
        assert top.get(token_id, logprob) == pytest.approx(logprob)

    stream = client.generate_stream(QUESTION, sampling=SamplingParams(**SAMPLING))
    chunks = [chunk async for chunk in stream]
    assert tuple(top for chunk in chunks for top in chunk.top_logprobs) == tops
    assert chunks[-1].samples[0].top_logprobs == tops
    (unasked,) = await client.generate(QUESTION)
    assert unasked.top_logprobs == ()

    prompt = {"messages": [{"role": "user", "content": "35+40"}]}
    for sampling in (SAMPLING, SAMPLING | {"top_logprobs": 0, "logprobs": NUM}):  # vLLM's name
        body = {"history": {"prompt": prompt}, "sampling": sampling}
        answer = (await world.http.post(f"{world.url}/v1/generate", json=body)).json()
        shown = answer["samples"][0]["top_logprobs"]
        assert [row["token_ids"] for row in shown] == [list(top) for top in tops]


async def test_each_position_names_its_likeliest_tokens_at_openai_s_routes(world):
    sampling = SamplingParams(**SAMPLING)
    (sample,) = await InferenceClient(world.channel).generate(QUESTION, sampling=sampling)
    tops = sample.top_logprobs
    url, body = f"{world.url}/v1/chat/completions", {**CHAT, "logprobs": True}
    body["top_logprobs"] = NUM
    whole = (await world.http.post(url, json=body)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    texts = [[world.tokenizer.decode([i]) for i in top] for top in tops]
    assert [[t["token"] for t in row["top_logprobs"]] for row in content] == texts
    first = [t["logprob"] for t in content[0]["top_logprobs"]]
    assert first == pytest.approx(list(tops[0].values()))

    streamed = await world.http.post(url, json={**body, "stream": True})
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    rows = [json.loads(line)["choices"][0].get("logprobs") or {} for line in lines]
    assert [entry for row in rows for entry in row.get("content", ())] == content

    plain = {"model": MODEL, "prompt": "35+40", "logprobs": 2, "max_tokens": 3}
    answer = (await world.http.post(f"{world.url}/v1/completions", json=plain)).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    assert all(1 <= len(row) <= 2 for row in logprobs["top_logprobs"])


async def test_tokens_that_could_not_be_sampled_are_not_named(world):
    sampling = SamplingParams(top_logprobs=20, top_k=3, max_new_tokens=4)
    (sample,) = await InferenceClient(world.channel).generate(QUESTION, sampling=sampling)
    assert [len(top) for top in sample.top_logprobs] == [3] * len(sample.top_logprobs)


async def test_an_engine_that_knows_the_sampled_token_alone_refuses_by_name(model_dir):
    async with agent_world(model_dir, ScriptedEngine(model_dir, ["Seven."] * 9)) as w:
        client = InferenceClient(w.channel)
        call = client.generate(QUESTION, sampling=SamplingParams(top_logprobs=1))
        await assert_refused(call, Unsupported, "UNSUPPORTED_LOGPROBS")
        body = {**CHAT, "logprobs": True, "top_logprobs": NUM}
        answer = await w.http.post(f"{w.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "knows the sampled token's log-prob alone" in answer.json()["error"]["message"]
    async with service("inference") as server, http_of(server) as http:
        body = {"token_ids": {"values": [1]}, "sampling": {"top_logprobs": 2}}
        answer = await http.post("/v1/generate", json=body)
        assert answer.status_code == 501
        assert "UNSUPPORTED_LOGPROBS" in answer.text
        body["sampling"] = {"top_logprobs": 21}
        answer = await http.post("/v1/generate", json=body)
        assert (answer.status_code, "INVALID_SAMPLING" in answer.text) == (400, True)


@pytest.mark.parametrize("number", [-1, 21, True, "5"])
def test_top_logprobs_outside_its_bounds_is_refused(number):
    with pytest.raises(InvalidInput, match="top_logprobs"):
        SamplingParams(top_logprobs=number)


def test_vllm_s_flat_log_probs_are_read_position_by_position():
    module = pytest.importorskip("vllm.logprobs")
    from dialoop_services.inference.vllm_engine.outputs import logprobs_of

    flat = module.FlatLogprobs()
    flat.append_fast([7, 3, 7], [-2.0, -0.5, -2.0], iter([2, 1, 2]), [None] * 3)
    flat.append_fast([4, 4, 9], [-0.1, -0.1, float("-inf")], iter([1, 1, 2]), [None] * 3)
    values, tops = logprobs_of(flat, 2)
    assert values == [-2.0, -0.1]
    assert [list(top.items()) for top in tops] == [[(3, -0.5), (7, -2.0)], [(4, -0.1)]]
    assert logprobs_of(None, 2) == ((), [])
