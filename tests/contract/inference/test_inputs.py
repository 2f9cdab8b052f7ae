"""What may be asked of a policy, in which forms, and what is said of a request that is wrong."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from dialoop.chat import ChatHistory, Message, ToolDefinition
from dialoop.clients.inference import GENERATE, LOG_PROB
from dialoop.errors import (
    DeadlineExceeded,
    DialoopError,
    DialoopWarning,
    InvalidHistory,
    InvalidInput,
    NotFound,
)
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as pb
from dialoop_services.inference.engine import BASE_VERSION
from dialoop_services.inference.generate import EnginePolicy

from tests.support.inference_world import (  # noqa: F401
    MAX_MODEL_LEN,
    QUESTION,
    assert_refused,
    model_dir,
    world,
)
from tests.support.rest_world import http_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPENED = "<|im_start|>user\n35+40<|im_end|>\n<|im_start|>assistant\n"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=9)


async def test_a_history_its_text_and_its_ids_are_continued_alike(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        ids = w.renderer.tokenizer.encode(OPENED, trusted=True).ids
        (of_history,) = await w.client.generate(QUESTION, sampling=GREEDY)
        (of_text,) = await w.client.generate(text=OPENED, sampling=GREEDY)
        (of_ids,) = await w.client.generate(token_ids=ids, sampling=GREEDY)
        rows = [sample.sequence.token_ids.tolist() for sample in (of_history, of_text, of_ids)]
        assert rows[0] == rows[1] == rows[2]
        assert of_text.text == of_ids.text
        assert of_text.text.prompt == OPENED
        sampled = of_text.sequence.token_ids[of_text.sequence.response_mask()].tolist()
        assert of_text.text.response == w.renderer.tokenizer.decode(sampled)
        assert of_text.text.full == OPENED + of_text.text.response
        assert of_text.history == ChatHistory()
        assert of_history.text is None
        assert [s.source for s in of_text.sequence.segments] == [Source.PROMPT, Source.MODEL]
        assert of_text.sequence.policy_versions == (BASE_VERSION,)


async def test_a_history_may_be_given_as_dicts_or_as_what_one_user_says(model_dir, tmp_path):
    text = QUESTION[0].text
    forms = (QUESTION, [{"role": "user", "content": text}], text)
    async with world(model_dir, tmp_path / "w") as w:
        own = EnginePolicy(w.replica.engine, w.renderer)
        twin = ScriptedPolicy(["7"])
        for policy in (w.client, own, twin):
            answers = [await policy.generate(form, sampling=GREEDY) for form in forms]
            rows = [sample.sequence.token_ids.tolist() for (sample,) in answers]
            assert rows == rows[:1] * 3
            assert all(sample.history.prompt == QUESTION for (sample,) in answers)
        chunks = [chunk async for chunk in w.client.generate_stream(text, sampling=GREEDY)]
        assert chunks[-1].samples[0].history.prompt == QUESTION


async def test_token_ids_that_are_no_utf8_survive(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        ids = w.renderer.tokenizer.encode("é").ids[:1] * 3
        (sample,) = await w.client.generate(token_ids=ids, sampling=GREEDY)
        assert sample.sequence.token_ids[:3].tolist() == list(ids)
        assert "\ufffd" in sample.text.prompt


@pytest.mark.parametrize(
    ("request_", "reason", "detail"),
    [
        (pb.GenerateRequest(), "PROMPT_MISSING", "found none"),
        (pb.GenerateRequest(text="a", token_ids={"values": [1]}), "PROMPT_AMBIGUOUS", "token_ids"),
        (pb.GenerateRequest(text="a", context={}), "BAD_CONTEXT", "found text"),
        (pb.GenerateRequest(text=""), "NO_TOKENS", "no token ids"),
        (pb.GenerateRequest(token_ids={"values": [-3]}), "TOKEN_OUT_OF_RANGE", "-3"),
        (pb.GenerateRequest(history={}), "PROMPT_MISSING", "found no messages"),
        (
            pb.GenerateRequest(history={"full": {"messages": [{"role": "user"}]}}),
            "PROMPT_MISSING",
            "found only full",
        ),
        (
            pb.GenerateRequest(text="a", template_options_json="[1]"),
            "INVALID_FIELD",
            "not a JSON object",
        ),
        (
            pb.GenerateRequest(
                history={"prompt": {"messages": [{"role": "user", "content": "1"}]}},
                template_options_json='{"tools": []}',
            ),
            "OPTION_RESERVED",
            "tools",
        ),
    ],
)
async def test_a_wrong_request_is_told_what_was_expected_and_found(
    model_dir, tmp_path, request_, reason, detail
):
    async with world(model_dir, tmp_path / "w") as w:
        with pytest.raises(DialoopError) as caught:
            await w.client._channel.call(GENERATE, request_)
        assert isinstance(caught.value, InvalidInput | InvalidHistory)
        assert caught.value.reason == reason
        assert detail in caught.value.message


async def test_an_unknown_template_is_named(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        call = w.client.generate(QUESTION, template_name="nonesuch")
        await assert_refused(call, NotFound, "TEMPLATE_NOT_FOUND")


async def test_template_tools_and_options_reach_the_rendering(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        tool = ToolDefinition(name="Calculator", description="adds", parameters_json="{}")
        (plain,) = await w.client.generate(QUESTION, sampling=GREEDY, template_name="qwen")
        assert plain.template_digest == w.renderer.template_named("qwen").digest
        w.renderer.template_named("qwen")
        (offered,) = await w.client.generate(
            QUESTION,
            sampling=SamplingParams(max_new_tokens=1),
            template_name="qwen",
            tools=[tool],
        )
        # The tiny model's context is too small for the whole of it: the ids say it was offered.
        assert offered.stop_reason is StopReason.CONTEXT_FULL
        text = w.renderer.tokenizer.decode(offered.sequence.token_ids.tolist())
        assert "Calculator" in text
        decode = w.renderer.tokenizer.decode
        assert "Calculator" not in decode(plain.sequence.token_ids.tolist())


async def test_a_long_prompt_is_full_or_cut_as_asked(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        ids = list(range(30, 90)) * 5
        (full,) = await w.client.generate(token_ids=ids)
        assert (full.stop_reason, full.num_truncated_tokens) == (StopReason.CONTEXT_FULL, 0)
        assert full.text.response == ""
        sampling = SamplingParams(max_new_tokens=7)
        (cut,) = await w.client.generate(token_ids=ids, truncate_prompt=True, sampling=sampling)
        assert cut.num_truncated_tokens == len(ids) - (MAX_MODEL_LEN - 7)
        prompt = cut.sequence.token_ids[: cut.sequence.segments[0].length].tolist()
        assert prompt == ids[cut.num_truncated_tokens :]
        assert cut.text.prompt == w.renderer.tokenizer.decode(prompt)
        assert cut.stop_reason in (StopReason.LENGTH, StopReason.STOP)
        sampling = SamplingParams(max_new_tokens=1000)
        (half,) = await w.client.generate(token_ids=ids, truncate_prompt=True, sampling=sampling)
        assert half.sequence.segments[0].length == MAX_MODEL_LEN // 2
        (whole,) = await w.client.generate(token_ids=ids[:50], truncate_prompt=True)
        assert whole.num_truncated_tokens == 0


async def test_what_is_taken_otherwise_than_asked_is_said(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (sample,) = await w.client.generate(QUESTION, sampling=GREEDY)
        assert sample.warnings == ()
        with pytest.warns(DialoopWarning, match="template_name is not used"):
            (sample,) = await w.client.generate(text="12", template_name="qwen", sampling=GREEDY)
        assert [w.split(" ")[0] for w in sample.warnings] == ["template_name"]
        greedy = SamplingParams(temperature=0.0, top_k=3, max_new_tokens=2)
        with pytest.warns(DialoopWarning, match="not used") as caught_warnings:
            (sample,) = await w.client.generate(QUESTION, truncate_prompt=True, sampling=greedy)
        assert [w.split(" ")[0] for w in sample.warnings] == ["truncate_prompt", "top_p,"]
        assert [str(w.message) for w in caught_warnings] == list(sample.warnings)
        with pytest.warns(DialoopWarning, match="top_p, top_k"):
            chunks = [c async for c in w.client.generate_stream(QUESTION, sampling=greedy)]
        assert len(chunks[-1].samples[0].warnings) == 1


async def test_sampling_is_recorded_as_applied(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        sampling = SamplingParams(top_p=0.5, top_k=4, min_p=0.125, seed=3, stop=("9",))
        samples = await w.client.generate(QUESTION, sampling=sampling, num_samples=2)
        for sample in samples:
            assert sample.sampling.truncates
            assert sample.sampling.temperature == 1.0
            assert sample.sampling.max_new_tokens == 20
            assert (sample.sampling.top_k, sample.sampling.seed) == (4, 3)
            assert sample.queue_s >= 0.0


async def test_histories_and_texts_are_scored_as_the_tokens_they_are(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        whole = QUESTION.append(Message(role="assistant", content="75"))
        text = w.renderer.template.render(whole, add_generation_prompt=False)
        ids = w.renderer.tokenizer.encode(text, trusted=True).ids
        by_ids = await w.client.logprobs([ids])
        by_history = await w.client.logprobs_of(histories=[whole, whole])
        by_text = await w.client.logprobs_of(texts=[text])
        for row_logprobs in (*by_history.logprobs, *by_text.logprobs):
            assert np.array_equal(row_logprobs, by_ids.logprobs[0])
        (row, _) = by_history.sequences
        assert row.token_ids.tolist() == list(ids)
        written = [s for s in row.segments if s.message_index == 1]
        spelt = [i for s in written for i in row.token_ids[s.start : s.end].tolist()]
        assert w.renderer.tokenizer.decode(spelt) == "75"
        assert by_ids.sequences == ()


async def test_wrong_rows_to_score_are_told_so(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        unfull = chat_pb2.ChatHistory(prompt={"messages": [{"role": "user", "content": "a"}]})
        for request, reason, detail in (
            (pb.LogProbRequest(), "PROMPT_MISSING", "found none"),
            (
                pb.LogProbRequest(texts=["a"], token_ids=[{"values": [1]}]),
                "PROMPT_AMBIGUOUS",
                "found token_ids and texts",
            ),
            (pb.LogProbRequest(histories=[unfull]), "FULL_MISSING", "found prompt"),
        ):
            with pytest.raises(DialoopError) as caught:
                await w.client._channel.call(LOG_PROB, request)
            assert caught.value.reason == reason
            assert detail in caught.value.message


async def until_free(w) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while w.replica.num_requests_running or w.replica.engine.num_running:
            await asyncio.sleep(0.01)


async def test_a_deadline_ends_what_was_asked_and_frees_its_place(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        await w.client.pause()
        for call in (
            w.client.generate(QUESTION, deadline_s=0.3),
            w.client.generate(QUESTION, num_samples=8, deadline_s=0.3),
        ):
            with pytest.raises(DeadlineExceeded):
                await call
            await until_free(w)
        with pytest.raises(DeadlineExceeded):
            async for _ in w.client.generate_stream(QUESTION, deadline_s=0.3):
                pass
        await until_free(w)
        await w.client.resume()
        assert await w.client.generate(QUESTION, sampling=GREEDY, deadline_s=PATIENCE_S)


async def test_a_caller_who_leaves_frees_the_place(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        await w.client.pause()
        tasks = [asyncio.create_task(w.client.generate(QUESTION, num_samples=8)) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while w.replica.engine.num_running < 24:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until_free(w)
        await w.client.resume()
        stream = w.client.generate_stream(QUESTION, sampling=SamplingParams(max_new_tokens=150))
        async for _ in stream:
            break
        await stream.aclose()
        await until_free(w)


async def test_over_rest_too_time_and_patience_end(model_dir, tmp_path):
    body = {"text": OPENED, "sampling": {"max_new_tokens": 9, "temperature": 0.0}}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        document = (await http.post("/v1/generate", json=body)).json()
        (sample,) = document["samples"]
        assert sample["text"]["full"] == OPENED + sample["text"]["response"]
        assert document["update_mode"] == "UPDATE_MODE_RECOMPUTE"
        wrong = await http.post("/v1/generate", json={"text": "a", "token_ids": {"values": [1]}})
        assert wrong.status_code == 400
        assert wrong.json()["reason"] == "PROMPT_AMBIGUOUS"
        full = {"token_ids": {"values": [7] * 999}}
        assert (await http.post("/v1/generate", json=full)).status_code == 200
        await w.client.pause()
        late = await http.post("/v1/generate", json=body, headers={"x-request-timeout-s": "0.3"})
        assert late.status_code == 504
        await until_free(w)
        task = asyncio.create_task(http.post("/v1/generate", json=body))
        async with asyncio.timeout(PATIENCE_S):
            while not w.replica.engine.num_running:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        await until_free(w)
