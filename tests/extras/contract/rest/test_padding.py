"""Padded arrays beside a sparse answer: a rendering of REST and of the SDK, told by lengths."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from dialoop.chat import Message
from dialoop.errors import InvalidInput
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import SamplingParams
from dialoop.views.views import TurnView
from dialoop.wire.sequences import sequence_to_proto
from dialoop_extras.padding import pad_output
from dialoop_services.rest.schema import models

from tests.support.inference_world import QUESTION, model_dir, world  # noqa: F401
from tests.support.rest_world import http_of, refusal, service

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.end_of_turn_ids[0]
SEVEN = TOKENIZER.encode("7").ids[0]
PROMPT = {"prompt": {"messages": [{"role": "user", "content": "3+4"}]}}


def unpad(part: dict[str, Any], index: int) -> list[Any]:
    start = part["starts"][index]
    return part["values"][index][start : start + part["lengths"][index]]


async def post_padded(
    http: httpx.AsyncClient, path: str, body: Any, **query: Any
) -> dict[str, Any]:
    answer = await http.post(path, json=body, params={"pad_output": "true", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("padding", ["end of turn", "a sampled token", "no token"])
async def test_padded_samples_are_the_sparse_ones_whatever_the_pad_id_is(
    model_dir, tmp_path, padding
):
    sampling = {"seed": 1, "max_new_tokens": 30, "stop": list("0123456789abcdefgh")}
    body = {"history": PROMPT, "num_samples": 8, "sampling": sampling}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        plain = (await http.post("/v1/generate", json=body)).json()
        pad = {
            "end of turn": w.renderer.tokenizer.end_of_turn_ids[0],
            "a sampled token": columns_of(plain["samples"][0])["token_ids"][-1],
            "no token": 10**6,
        }[padding]
        answer = await post_padded(http, "/v1/generate", body, pad_token_id=pad)
    assert answer["samples"] == plain["samples"]
    assert "padded" not in plain
    padded = answer["padded"]
    tokens, log_probs, masks = padded["tokens"], padded["log_probs"], padded["masks"]
    assert (padded["pad_token_id"], padded["padding_side"]) == (pad, "left")
    lengths = set(tokens["response"]["lengths"])
    assert len(lengths) > 1  # else nothing is padded
    for index, sample in enumerate(plain["samples"]):
        row = columns_of(sample)
        assert unpad(tokens["full"], index) == row["token_ids"]
        num_model = len(row["inference_logprobs"])
        assert unpad(tokens["response"], index) == row["token_ids"][-num_model:]
        assert unpad(log_probs["response"], index) == pytest.approx(row["inference_logprobs"])
        width, start = len(tokens["full"]["values"][0]), tokens["full"]["starts"][index]
        real = [start <= i < start + len(row["token_ids"]) for i in range(width)]
        assert masks["all_attention_mask"][index] == real
        assert sum(masks["all_assistant_mask"][index]) == num_model
        # Responses begin in one column; what is no token is the pad id, and its log-prob unknown.
        assert tokens["response"]["starts"][index] == 0
        values = tokens["full"]["values"][index]
        assert all(v == pad for v, is_token in zip(values, real, strict=True) if not is_token)
        is_known = [value is not None for value in log_probs["full"]["values"][index]]
        assert is_known == masks["all_assistant_mask"][index]


def columns_of(sample):
    """Return the numbers of the columns of an answer's sequence by name."""
    return {column["name"]: column["data"] for column in sample["sequence"]["columns"]}


async def test_a_continued_context_is_part_of_the_padded_row(model_dir, tmp_path):
    encode = models().encoder
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        (first,) = await w.client.generate(QUESTION, sampling=SamplingParams(max_new_tokens=3))
        longer = first.history.full.append(Message(role="tool", content="75"))
        context = sequence_to_proto(first.sequence)
        body = {
            "history": {"prompt": {"messages": [{"role": m.role, "content": m.text,
                                                 "is_complete": m.is_complete} for m in longer]}},
            "context": encode(context.DESCRIPTOR)(context),
            "num_context_messages": 2,
            "sampling": {"max_new_tokens": 3, "temperature": 0.0},
        }  # fmt: skip
        answer = await post_padded(http, "/v1/generate", body, pad_token_id=0)
    (sample,) = answer["samples"]
    whole = first.sequence.token_ids.tolist() + columns_of(sample)["token_ids"]
    assert unpad(answer["padded"]["tokens"]["full"], 0) == whole


@pytest.mark.parametrize("side", ["left", "right"])
async def test_scored_rows_are_padded_on_the_side_that_is_asked(side):
    rows = [[SEVEN, EOS], [SEVEN, SEVEN, EOS, EOS]]
    body = {"token_ids": [{"values": row} for row in rows]}
    async with service("inference") as server, http_of(server) as http:
        answer = await post_padded(http, "/v1/logprob", body, pad_token_id=EOS, padding_side=side)
    padded, pads = answer["padded"], [EOS, EOS]
    first = pads + rows[0] if side == "left" else rows[0] + pads
    assert padded["tokens"]["full"]["values"] == [first, rows[1]]
    assert padded["tokens"]["full"]["lengths"] == [2, 4]
    real = [False, False, True, True] if side == "left" else [True, True, False, False]
    assert padded["masks"]["all_attention_mask"] == [real, [True] * 4]
    values = padded["log_probs"]["full"]["values"]
    assert values[1] == [None, *[pytest.approx(-0.1)] * 3]
    assert [v is not None for v in values[0]].count(True) == 1
    assert set(padded["tokens"]) == {"full"}


async def test_padding_is_asked_for_whole_or_refused():
    body = {"history": PROMPT}
    async with service("inference") as server, http_of(server) as http:
        for query, reason in (
            ("pad_output=true", "BAD_PADDING"),
            ("pad_token_id=0", "BAD_PADDING"),
            ("pad_output=true&pad_token_id=-1", "INVALID_FIELD"),
            ("pad_output=true&pad_token_id=0&padding_side=up", "INVALID_FIELD"),
            ("pad_output=true&pad_token_id=0&pad_token_id=1", "INVALID_FIELD"),
            ("pad_outputs=true", "UNKNOWN_FIELD"),
        ):
            answer = await http.post(f"/v1/generate?{query}", json=body)
            assert refusal(answer) == (400, reason), query
        padding = "pad_output=true&pad_token_id=0"
        answer = await http.post(
            f"/v1/generate?{padding}", json=body, headers={"accept": "application/x-protobuf"}
        )
        assert refusal(answer) == (400, "BAD_PADDING")
        for path in ("/v1/generate_stream", "/v1/pause"):
            assert refusal(await http.post(f"{path}?{padding}", json={})) == (400, "BAD_PADDING")
        assert (await http.post("/v1/generate?pad_output=false", json=body)).status_code == 200


async def test_the_sdk_pads_samples_and_takes_the_padding_off_again(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        sampling = SamplingParams(seed=1, max_new_tokens=30)
        samples = await w.client.generate(QUESTION, sampling=sampling, num_samples=4)
    views = [TurnView.of_sample(sample) for sample in samples]
    for pad in (EOS, SEVEN):
        output = pad_output(views, pad_token_id=pad)
        assert output.tokens.unpad() == [view.tokens for view in views]
        assert np.array_equal(output.masks.all_attention_mask, output.tokens.full.mask())
        rows = output.log_probs["response"].rows()
        for row, sample in zip(rows, samples, strict=True):
            assert np.array_equal(row, sample.sequence.inference_logprobs)


def test_nothing_and_no_id_are_not_padded():
    with pytest.raises(InvalidInput, match="0 turns"):
        pad_output([], pad_token_id=0)
