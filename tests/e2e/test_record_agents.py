"""Unmodified agents become training data: their tokens are the engine's, and train the model."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from dialoop.sequences import Source
from dialoop.trajectory import SamplingParams
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import update
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

from tests.support.agent_world import LoggingEngine, agent_world, make_tool_model
from tests.support.recorded_agents import AGENTS, ANSWER, demonstrations, run_by_hand, warm_start

pytestmark = pytest.mark.timeout(300)  # a busy machine takes its time

GREEDY = SamplingParams(temperature=0.0)
OPTIONS = EngineOptions(max_model_len=2000, max_num_seqs=4)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A tiny model that has learnt the tools' format."""
    directory = make_tool_model(tmp_path_factory.mktemp("record") / "model")
    loss = warm_start(directory, asyncio.run(demonstrations(directory)), num_steps=40)
    assert loss < 0.02
    return directory


@asynccontextmanager
async def transformers_world(directory):
    engine = await TransformersEngine.start(directory, OPTIONS)
    try:
        async with agent_world(directory, LoggingEngine(engine)) as world:
            yield world
    finally:
        await engine.close()


async def record(world, name: str, run):
    """An agent's run as its trajectory."""
    world.engine.log.clear()
    assert await run(await world.start_recording(name, sampling=GREEDY)) == ANSWER
    return await world.recordings.close(name)


def require_engines_ids(trajectory, log) -> None:
    """One sequence whose every token is one that the engine saw or sampled."""
    (sequence,) = trajectory.sequences
    assert len(log) == 3
    assert tuple(sequence.token_ids.tolist()) == log[-1].prompt_ids + log[-1].token_ids
    ids = sequence.token_ids[sequence.response_mask()].tolist()
    assert ids == [token for sampling in log for token in sampling.token_ids]
    assert Source.TOOL in {segment.source for segment in sequence.segments}
    assert [len(m.tool_calls) for m in trajectory.history if m.role == "assistant"] == [1, 1, 0]
    assert trajectory.is_scorable


def train_step(directory, trajectory) -> float:
    """How far one train step moves the model's weights, at most."""
    policy = load_policy(directory)
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = GuardedOptimizer(list(policy.parameters()), OptimizerSettings(learning_rate=1e-3))
    rows = [TokenRow.from_sequence(replace(s, advantage=1.0)) for s in trajectory.sequences]
    report = update(policy, optimizer, [pack_rows(rows)], load_objective("dppo_mask"))
    assert report.step.applied
    pairs = zip(before, policy.parameters(), strict=True)
    return max(float((old - new.detach()).abs().max()) for old, new in pairs)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_unmodified_agent_becomes_training_data(warm, name):
    async with transformers_world(warm) as world:
        trajectory = await record(world, name, AGENTS[name])
        require_engines_ids(trajectory, world.engine.log)
    assert train_step(warm, trajectory) > 1e-6
    (sequence,) = trajectory.sequences
    assert np.isfinite(sequence.inference_logprobs).all()
    policy = load_policy(warm)
    with torch.no_grad():
        row = TokenRow.from_sequence(replace(sequence, advantage=1.0))
        batch = pack_rows([row])
        scores = policy(batch, temperature=1.0).logprobs
    assert np.abs(scores.numpy() - sequence.inference_logprobs).max() < 1e-4


async def test_a_streaming_agent_gives_the_same_tokens(warm):
    async with transformers_world(warm) as world:
        whole = await record(world, "whole", run_by_hand)
        streamed = await record(world, "streamed", lambda c: run_by_hand(c, stream=True))
        require_engines_ids(streamed, world.engine.log)
    (at_once,), (streamed_sequence,) = whole.sequences, streamed.sequences
    assert at_once.token_ids.tolist() == streamed_sequence.token_ids.tolist()
    assert [s.source for s in at_once.segments] == [s.source for s in streamed_sequence.segments]


@pytest.mark.heavy(reason="starts vLLM")
@pytest.mark.vllm
async def test_unmodified_agents_on_vllm(warm):
    vllm_engine = pytest.importorskip("dialoop_services.inference.vllm_engine.engine")
    engine = await vllm_engine.VllmEngine.start(warm, OPTIONS)
    try:
        async with agent_world(warm, LoggingEngine(engine)) as world:
            for name, agent in AGENTS.items():
                trajectory = await record(world, name, agent)
                require_engines_ids(trajectory, world.engine.log)
                assert train_step(warm, trajectory) > 1e-6
    finally:
        await engine.close()
