"""Answers carry the experts of their tokens: over turns, over both doors, and in process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dialoop.chat import History, Message
from dialoop.sequences import Along, ForkCause
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_learning.model.experts import chosen_experts, routers_of, watch_routers
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.generate import EnginePolicy
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.transformers_engine.engine import TransformersEngine, load_model

from benchmarks.servers.families import make_family
from tests.support.inference_world import QUESTION, world
from tests.support.rest_world import http_of

SAMPLING = SamplingParams(temperature=1.0, seed=5, max_new_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    fields = {"max_position_embeddings": 160}
    return make_family("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", fields=fields)


@pytest.fixture
async def engine(model_dir):
    options = EngineOptions(max_model_len=120, max_num_seqs=8, records_experts=True)
    engine = await TransformersEngine.start(model_dir, options)
    yield engine
    await engine.close()


def user(text):
    return Message(role="user", content=text)


def chosen_by(model_dir, ids):
    model = load_model(model_dir, torch.float32)
    with torch.no_grad(), watch_routers(routers_of(model)) as routed:
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.sort(chosen_experts(routed).numpy(), axis=-1)


def record_of(sequence):
    column = sequence.columns["routed_experts"]
    assert column.along is Along.TOKENS
    assert column.values.dtype == np.uint8
    return np.sort(column.values, axis=-1)


async def two_turns(generate):
    """The sequence of two turns, with a message of a tool between them; and the first's length."""
    (first,) = await generate(QUESTION, sampling=SAMPLING)
    longer = first.history.require_full().append(user("and 3 more?"))
    (second,) = await generate(
        longer,
        context=first.sequence,
        num_context_messages=len(longer) - 1,
        sampling=SAMPLING,
        turn=1,
    )
    assert second.sequence.fork_cause is ForkCause.NONE
    return first.sequence.extended_by(second.sequence), len(first.sequence)


async def test_over_two_turns_each_token_that_was_computed_has_its_experts(
    engine, model_dir, tmp_path
):
    async with world(model_dir, tmp_path / "w", engine=engine) as w:
        whole, num_first = await two_turns(w.client.generate)
        own, _ = await two_turns(EnginePolicy(engine, Renderer.of(model_dir)).generate)
    assert own.token_ids.tolist() == whole.token_ids.tolist()
    assert own.columns == whole.columns
    recorded, expected = record_of(whole), chosen_by(model_dir, whole.token_ids)
    assert len(whole) > num_first + 8
    ends = [num_first - 1, len(whole) - 1]  # nothing follows an answer's last token in its pass
    assert (recorded[ends] == 255).all()
    others = np.delete(np.arange(len(whole)), ends)
    np.testing.assert_array_equal(recorded[others], expected[others])


async def test_a_fork_and_a_full_context_have_a_row_for_each_token(engine, model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", engine=engine) as w:
        (first,) = await w.client.generate(QUESTION, sampling=SAMPLING)
        other = History((user("12+13"),)).extend(first.history.require_full()[1:])
        other = other.append(user("and?"))
        (fork,) = await w.client.generate(
            other,
            context=first.sequence,
            num_context_messages=len(other) - 1,
            sampling=SAMPLING,
        )
        assert fork.sequence.fork_cause is not ForkCause.NONE
        recorded = record_of(fork.sequence)
        expected = chosen_by(model_dir, fork.sequence.token_ids)
        np.testing.assert_array_equal(recorded[:-1], expected[:-1])
        long = History((user("1+1" * 200),))
        (full,) = await w.client.generate(long, sampling=SAMPLING)
        assert full.stop_reason is StopReason.CONTEXT_FULL
        assert (record_of(full.sequence) == 255).all()


async def test_both_doors_and_a_stream_give_the_same(engine, model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w", engine=engine, has_rest=True) as w:
        (sample,) = await w.client.generate(QUESTION, sampling=SAMPLING)
        chunks = [c async for c in w.client.generate_stream(QUESTION, sampling=SAMPLING)]
        async with http_of(w.server) as http:
            body = {
                "history": {"prompt": {"messages": [{"role": "user", "content": "35+40"}]}},
                "sampling": {"temperature": 1.0, "seed": 5, "max_new_tokens": 8},
            }
            answer = (await http.post("/v1/generate", json=body)).json()
    assert chunks[-1].samples[0].sequence.columns == sample.sequence.columns
    columns = {c["name"]: c for c in answer["samples"][0]["sequence"]["columns"]}
    values = sample.sequence.columns["routed_experts"].values
    shown = columns["routed_experts"]
    assert shown["shape"] == list(values.shape)
    assert shown["data"] == values.flatten().tolist()


async def test_an_answer_that_another_replica_began_has_the_record_of_all(
    engine, model_dir, tmp_path
):
    async with world(model_dir, tmp_path / "w", engine=engine) as w:
        (sample,) = await w.client.generate(
            QUESTION, sampling=dataclasses.replace(SAMPLING, seed=None, max_new_tokens=3)
        )
        part = part_of(sample.sequence)
        sampling = dataclasses.replace(SAMPLING, seed=None)
        stream = w.client.generate_stream(QUESTION, sampling=sampling, partial_answer=part)
        (whole,) = [chunk async for chunk in stream][-1].samples
    assert len(whole.sequence) == len(sample.sequence) + 5
    expected = chosen_by(model_dir, whole.sequence.token_ids)
    np.testing.assert_array_equal(record_of(whole.sequence)[:-1], expected[:-1])


def part_of(sequence):
    """What the policy sampled of a sequence of one turn, alone."""
    count = sequence.num_model_tokens
    (segment,) = (s for s in sequence.segments if s.policy_version is not None)
    return dataclasses.replace(
        sequence,
        token_ids=sequence.token_ids[-count:],
        segments=(segment.shift(-segment.start),),
        columns={},
    )
