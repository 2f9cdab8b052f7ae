"""What may be asked of sampling, and what the answer says of its log-probs, through both doors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dialoop.clients.inference import GENERATE, LOG_PROB
from dialoop.errors import DialoopWarning, InvalidInput
from dialoop.trajectory import SamplingParams
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as pb

from tests.support.inference_world import QUESTION, model_dir, world  # noqa: F401
from tests.support.rest_world import http_of, refusal, service

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPENED = "<|im_start|>user\n35+40<|im_end|>\n<|im_start|>assistant\n"
PROMPT = {"prompt": {"messages": [{"role": "user", "content": "35+40"}]}}


async def test_a_repetition_penalty_is_applied_recorded_and_named(model_dir, tmp_path):
    sampling = {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 3, "max_new_tokens": 12}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        (sample,) = await w.client.generate(QUESTION, sampling=SamplingParams(**sampling))
        assert sample.sampling.repetition_penalty == 1.5
        assert sample.sampling.alters
        (scored,) = (await w.client.logprobs([sample.sequence.token_ids])).logprobs
        mask = sample.sequence.response_mask()[1:]
        assert np.abs(scored[mask] - sample.sequence.inference_logprobs).max() > 1e-3
        answer = await http.post("/v1/generate", json={"history": PROMPT, "sampling": sampling})
        (document,) = answer.json()["samples"]
        columns = {each["name"]: each["data"] for each in document["sequence"]["columns"]}
        assert columns["token_ids"] == sample.sequence.token_ids.tolist()
        assert answer.json()["distribution"] == "DISTRIBUTION_PROCESSED"


async def test_an_answer_says_which_distribution_its_log_probs_are_of(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        for sampling, expected in (
            ({}, chat_pb2.DISTRIBUTION_RAW),
            ({"temperature": 0.0}, chat_pb2.DISTRIBUTION_RAW),
            ({"temperature": 0.7}, chat_pb2.DISTRIBUTION_PROCESSED),
            ({"top_k": 2}, chat_pb2.DISTRIBUTION_PROCESSED),
        ):
            request = pb.GenerateRequest(history=PROMPT, sampling=sampling | {"max_new_tokens": 2})
            assert (await w.channel.call(GENERATE, request)).distribution == expected
        scored = await w.channel.call(LOG_PROB, pb.LogProbRequest(texts=["12"]))
        assert scored.distribution == chat_pb2.DISTRIBUTION_RAW


async def test_a_penalty_out_of_its_bounds_is_refused_at_both_doors(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        for penalty in (0.0, -1.5, 1e-40, 1e-10, 0.0099, 100.1, 1e30):
            request = {"history": PROMPT, "sampling": {"repetition_penalty": penalty}}
            answer = await http.post("/v1/generate", json=request)
            assert (answer.status_code, answer.json()["reason"]) == (400, "INVALID_SAMPLING")
            with pytest.raises(InvalidInput, match="repetition_penalty"):
                await w.channel.call(GENERATE, pb.GenerateRequest(**request))


@pytest.mark.parametrize("penalty", [0.01, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
async def test_at_the_bounds_of_sampling_log_probs_are_numbers(
    model_dir, tmp_path, penalty, temperature
):
    sampling = SamplingParams(repetition_penalty=penalty, temperature=temperature, max_new_tokens=8)
    async with world(model_dir, tmp_path / "w") as w:
        (sample,) = await w.client.generate(QUESTION, sampling=sampling)
        assert np.isfinite(sample.sequence.inference_logprobs).all()


async def test_older_names_of_sampling_are_read_as_ours_are(model_dir, tmp_path):
    ours = {"max_new_tokens": 6, "stop": ["9"], "temperature": 0.0}
    older = {"max_tokens": 6, "stop_sequences": "9", "do_sample": False, "n": 2, "num_beams": 1}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        plain = {"history": PROMPT, "sampling": ours, "num_samples": 2}
        expected = (await http.post("/v1/generate", json=plain)).json()
        answer = await http.post("/v1/generate", json={"history": PROMPT, "sampling": older})
        document = answer.json()
        assert document["samples"] == expected["samples"]
        assert document["sampling"] == expected["sampling"]
        assert document["warnings"] == []


@pytest.mark.parametrize("beside", [{}, {"max_new_tokens": 6}, {"max_tokens": 6}])
@pytest.mark.parametrize(("top_k", "status"), [(0, 200), (-1, 200), (-2, 400)])
async def test_a_top_k_means_the_same_whatever_stands_beside_it(beside, top_k, status):
    async with service("inference") as server, http_of(server) as http:
        body = {"history": PROMPT, "sampling": {"top_k": top_k} | beside}
        answer = await http.post("/v1/generate", json=body)
        assert answer.status_code == status
        if status == 200:
            assert "top_k" not in answer.json()["sampling"]
            assert answer.json()["distribution"] == "DISTRIBUTION_RAW"
        else:
            assert answer.json()["reason"] == "INVALID_SAMPLING"


async def test_of_two_names_the_older_wins_with_a_warning_also_on_a_stream():
    both = {"max_tokens": 6, "max_new_tokens": 9}
    warnings = ["max_tokens 6 was taken, max_new_tokens 9 was not: give one of them."]
    async with service("inference") as server, http_of(server) as http:
        body = {"history": PROMPT, "sampling": both}
        document = (await http.post("/v1/generate", json=body)).json()
        assert (document["sampling"]["max_new_tokens"], document["warnings"]) == (6, warnings)
        lines = await http.post("/v1/generate_stream", json={"request": body})
        last = json.loads(lines.text.splitlines()[-1])
        assert last["completed"]["warnings"] == warnings


@pytest.mark.parametrize(
    ("sampling", "status", "reason"),
    [
        ({"num_beams": 4}, 501, "BEAMS_UNSUPPORTED"),
        ({"presence_penalty": 0.5}, 501, "SAMPLING_UNSUPPORTED"),
        ({"n": 2, "num_return_sequences": 3}, 400, "INVALID_SAMPLING"),
        ({"do_sample": False, "temperature": 0.7}, 400, "INVALID_SAMPLING"),
        ({"logprobs": True}, 400, "INVALID_SAMPLING"),
        ({"tempreature": 0.7}, 400, "UNKNOWN_FIELD"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_named(sampling, status, reason):
    async with service("inference") as server, http_of(server) as http:
        answer = await http.post("/v1/generate", json={"history": PROMPT, "sampling": sampling})
        assert refusal(answer) == (status, reason)
        assert answer.json()["remedy"]


async def test_two_counts_of_samples_are_refused_wherever_they_stand():
    async with service("inference") as server, http_of(server) as http:
        body = {"history": PROMPT, "num_samples": 3, "sampling": {"n": 2}}
        assert refusal(await http.post("/v1/generate", json=body)) == (400, "INVALID_SAMPLING")


async def test_special_tokens_are_left_out_of_a_response_s_text_and_stay_tokens(
    model_dir, tmp_path
):
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        tokenizer = w.renderer.tokenizer
        sampling = SamplingParams(seed=1, max_new_tokens=60)
        request = {"text": OPENED, "sampling": sampling, "num_samples": 8}
        plain = await w.client.generate(**request)
        skipping = await w.client.generate(**request, skip_special_tokens=True)
        assert any(p.text.response != s.text.response for p, s in zip(plain, skipping, strict=True))
        for plain_sample, other in zip(plain, skipping, strict=True):
            ids = other.sequence.token_ids.tolist()
            assert plain_sample.sequence.token_ids.tolist() == ids
            sampled = other.sequence.token_ids[other.sequence.response_mask()].tolist()
            plainly = [i for i in sampled if not tokenizer.is_special(i)]
            assert other.text.response == tokenizer.decode(plainly)
            assert other.text.full == OPENED + other.text.response
        stream = w.client.generate_stream(text=OPENED, sampling=sampling, skip_special_tokens=True)
        chunks = [c async for c in stream]
        text = "".join(c.text for c in chunks)  # an unfinished character is never told
        assert chunks[-1].samples[0].text.response.rstrip("\ufffd") == text.rstrip("\ufffd")
        body = {"text": OPENED, "sampling": {"seed": 1, "max_new_tokens": 60}, "num_samples": 8}
        document = (
            await http.post("/v1/generate", json=body | {"skip_special_tokens": True})
        ).json()
        texts = [sample["text"]["response"] for sample in document["samples"]]
        assert texts == [sample.text.response for sample in skipping]
        with pytest.warns(DialoopWarning, match="skip_special_tokens is not used"):
            await w.client.generate(QUESTION, sampling=sampling, skip_special_tokens=True)


async def test_samples_of_one_prompt_share_its_id_and_are_numbered(model_dir, tmp_path):
    sampling = SamplingParams(max_new_tokens=2)
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        samples = await w.client.generate(QUESTION, sampling=sampling, num_samples=3)
        assert [sample.sample_index for sample in samples] == [0, 1, 2]
        (prompt_id,) = {sample.prompt_id for sample in samples}
        (other,) = await w.client.generate(text="12", sampling=sampling)
        assert prompt_id != other.prompt_id
        document = (
            await http.post("/v1/generate", json={"history": PROMPT, "num_samples": 2})
        ).json()
        numbers = [(sample["prompt_id"], sample["sample_index"]) for sample in document["samples"]]
        assert numbers == [(prompt_id, 0), (prompt_id, 1)]
