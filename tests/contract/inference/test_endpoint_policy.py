"""`dialoop eval` of a policy behind an OpenAI-compatible endpoint: here, Dialoop's own."""

from __future__ import annotations

import pytest
from dialoop.environments import load_environment
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.local.client import LocalEnvironmentClient
from dialoop.trajectory import SamplingParams
from dialoop_ops.evaluation import (
    EndpointPolicy,
    EvaluationRecords,
    EvaluationResults,
    EvaluationSpec,
    evaluate,
)

from tests.support.agent_world import MODEL, ScriptedEngine, agent_world, make_tool_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("endpoint") / "model")


async def test_its_answers_are_played_and_have_no_tokens_of_ours(directory, tmp_path):
    spec = EvaluationSpec(environment="arithmetic", policy="endpoint", num_tasks=1, num_samples=2)
    engine = ScriptedEngine(directory, ["Result=57<submit>"] * 2)
    async with (
        agent_world(directory, engine) as world,
        EndpointPolicy(f"{world.url}/v1", model=MODEL) as policy,
        LocalEnvironmentClient(load_environment("arithmetic")) as sessions,
    ):
        with EvaluationRecords.open(tmp_path / "e", spec) as records:
            await evaluate(spec, sessions=sessions, policy=policy, records=records)
    results = EvaluationResults.of(tmp_path / "e")
    assert results.num_failed == 0
    (rewards,) = results.rewards.values()
    assert len(rewards) == 2
    text = (tmp_path / "e" / "trajectories.jsonl").read_text()
    assert text.count("Result=57<submit>") == 2
    assert '"token_ids"' not in text


async def test_an_endpoint_that_is_away_or_refuses_is_a_failure_with_a_reason(directory):
    from dialoop.chat import History

    history = History.from_chats([{"role": "user", "content": "3+4?"}])
    async with (
        agent_world(directory, ScriptedEngine(directory, [])) as world,
        EndpointPolicy(f"{world.url}/v1", model="another") as policy,
    ):
        with pytest.raises(Unavailable, match="does not answer"):
            await policy.generate(history)
        with pytest.raises(InvalidConfig, match="without constraint"):
            await policy.generate(history, sampling=SamplingParams(top_logprobs=2))
