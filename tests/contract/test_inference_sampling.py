"""What may be asked of sampling, and what the answer says of its log-probs, through both doors."""

from __future__ import annotations

import numpy as np
import pytest
from dialoop.clients.inference import GENERATE, LOG_PROB
from dialoop.errors import InvalidInput
from dialoop.trajectory import SamplingParams
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as pb

from tests.inference_world import QUESTION, model_dir, world  # noqa: F401
from tests.rest_world import http_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPT = {"prompt": {"messages": [{"role": "user", "content": "35+40"}]}}


async def test_a_repetition_penalty_is_applied_recorded_and_named(model_dir, tmp_path):
    given = {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 3, "max_new_tokens": 12}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        (sample,) = await w.client.generate(QUESTION, sampling=SamplingParams(**given))
        assert sample.sampling.repetition_penalty == 1.5
        assert sample.sampling.alters
        (scored,) = (await w.client.logprobs([sample.sequence.token_ids])).logprobs
        mask = sample.sequence.response_mask()[1:]
        assert np.abs(scored[mask] - sample.sequence.inference_logprobs).max() > 1e-3
        answer = await http.post("/v1/generate", json={"history": PROMPT, "sampling": given})
        (told,) = answer.json()["samples"]
        assert told["sequence"]["token_ids"] == sample.sequence.token_ids.tolist()
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


async def test_a_penalty_that_is_none_is_refused_at_both_doors(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        for penalty in (0.0, -1.5):
            request = {"history": PROMPT, "sampling": {"repetition_penalty": penalty}}
            answer = await http.post("/v1/generate", json=request)
            assert (answer.status_code, answer.json()["reason"]) == (400, "INVALID_SAMPLING")
            with pytest.raises(InvalidInput, match="repetition_penalty"):
                await w.channel.call(GENERATE, pb.GenerateRequest(**request))
