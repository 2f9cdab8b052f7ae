"""A verifiers environment owns its loop; its calls and rewards become a trajectory of ours."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import dialoop_ops
import pytest
from dialoop.agents import AgentHost, load_agent, play_agent
from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import InvalidConfig, NotFound
from dialoop.sequences import Source
from dialoop.trajectory import Owner, Task
from dialoop_extras.compat.verifiers import VerifiersAgent, VerifiersTasks, outcome_of
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import update
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

from tests.support.agent_world import (
    LoggingEngine,
    ScriptedEngine,
    agent_world,
    call_text,
    make_tool_model,
    require_owned_once,
)

PROGRAMS = str(Path(__file__).parents[3] / "support" / "programs")
CONFIG = {
    "taskset": {"id": "verifiers_calculator"},
    "agent": {"harness": {"id": "verifiers_calculator"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture
def installation(monkeypatch):
    pytest.importorskip("verifiers.v1", reason="verifiers pins openai<3: see infra/test_compat.sh")
    monkeypatch.syspath_prepend(PROGRAMS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("verifiers") / "model")


def task(key: str) -> Task:
    return Task(task_id="t", environment="sums", split="train", key=key)


async def play(world, key: str):
    host = AgentHost(recordings=world.recordings)
    return await play_agent(task(key), agent=VerifiersAgent(CONFIG), host=host)


async def test_a_run_with_a_tool_is_a_trajectory_with_verifiers_rewards(installation, directory):
    engine = ScriptedEngine(directory, [call_text("add", a=3, b=4), "It is 7."])
    async with agent_world(directory, engine, token="a-token") as world:
        trajectory = await play(world, "0")
    assert trajectory.failures == ()
    assert trajectory.reward == 2.0
    assert [m.role for m in trajectory.history] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.history[2].text == "7"
    assert trajectory.labels["verifiers/turns"] == "2"
    (sequence,) = trajectory.sequences
    assert Source.TOOL in {segment.source for segment in sequence.segments}
    require_owned_once(trajectory, engine)


async def test_what_a_model_samples_in_it_trains_the_model(installation, directory):
    model = await TransformersEngine.start(
        directory, EngineOptions(max_model_len=2048, max_num_seqs=2)
    )
    try:
        engine = LoggingEngine(model)
        async with agent_world(directory, engine) as world:
            trajectory = await play(world, "0")
        require_owned_once(trajectory, engine)
    finally:
        await model.close()
    assert trajectory.failures == ()
    assert [r.name for turn in trajectory.turns for r in turn.rewards] == ["is_right"]
    (sequence,) = trajectory.sequences
    row = TokenRow.from_sequence(replace(sequence, advantage=1.0))
    policy = load_policy(directory)
    optimizer = GuardedOptimizer(list(policy.parameters()), OptimizerSettings(learning_rate=1e-3))
    assert update(policy, optimizer, [pack_rows([row])], load_objective("dppo_mask")).step.applied


async def test_a_wrong_answer_is_a_reward_of_zero_and_no_failure(installation, directory):
    async with agent_world(directory, ScriptedEngine(directory, ["It is 5."])) as world:
        trajectory = await play(world, "1")
    assert trajectory.failures == ()
    assert [r.value for turn in trajectory.turns for r in turn.rewards] == [0.0]


async def test_a_reward_that_fails_marks_the_trajectory_and_tells_nothing(installation, directory):
    async with agent_world(directory, ScriptedEngine(directory, ["It is 5."])) as world:
        trajectory = await play(world, "2")
    (failure,) = trajectory.failures
    assert failure.owner is Owner.REWARD
    assert failure.reason == "TaskError"
    assert "secret" not in failure.message
    assert not trajectory.is_scorable


async def test_an_engine_that_fails_is_owned_by_the_inference(installation, directory):
    engine = ScriptedEngine(directory, [], fails=lambda number: RuntimeError("secret text"))
    async with agent_world(directory, engine) as world:
        trajectory = await play(world, "0")
    assert {failure.owner for failure in trajectory.failures} == {Owner.INFERENCE}
    assert all("secret" not in failure.message for failure in trajectory.failures)


async def test_the_tasks_of_a_taskset_are_listed(installation):
    environment = ChatEnv(name="sums", tasks=VerifiersTasks(CONFIG))
    assert [ref.key for ref in environment.tasks.page("train", one_epoch=True).tasks] == list("012")
    opening = environment.reset(environment.tasks.get("train", "1"), seed=0)
    assert [m.text for m in opening.episode.history] == ["What is 2+2?"]
    assert opening.episode.task.answer == ""


async def test_unknown_tasks_and_environments_are_refused(installation, directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        trajectory = await play(world, "9")
    (failure,) = trajectory.failures
    assert failure.reason == "AGENT_FAILED"
    assert "holds no task '9'" in failure.message
    with pytest.raises(NotFound, match="no_such_taskset"):
        VerifiersAgent({"taskset": {"id": "no_such_taskset"}})
    with pytest.raises(InvalidConfig):
        VerifiersAgent(CONFIG | {"nonsense": 1})


def test_an_episode_of_several_agents_is_refused():
    class Episode:
        traces = (1, 2)

    (failure,) = outcome_of(Episode()).failures
    assert failure.reason == "SEVERAL_AGENTS"


def test_a_job_names_the_taskset_and_trains_on_its_rewards(installation, tmp_path):
    table = {"use": "verifiers", "agent": "verifiers", "options": {**CONFIG, "limit": 2}}
    job = {
        "run": "taskset",
        "model": {"directory": str(make_tool_model(tmp_path / "model"))},
        "environment": table,
        "inference": {"max_model_len": 512},
        "collector": {"group_size": 4, "max_new_tokens": 8},
        # An untrained model earns the same for all of a group, and that alone is no signal.
        "scorer": {"kl_coefficient": 0.1},
        "train": {"num_steps": 1, "groups_per_train_step": 2, "pipeline_depth": 0},
        "evaluation": {"num_tasks": 0},
    }
    result = dialoop_ops.train(job, in_process=True, folder=tmp_path, quiet=True)
    assert result.summary["trajectories"]["trained"] >= 2
    lines = (result.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    truths = ("7", "4")
    for line in lines:
        played = json.loads(line)
        (turn,) = played["turns"]
        right = truths[int(played["task_key"])] in played["messages"][-1]["content"]
        assert turn["rewards"]["is_right"] == 2.0 * right


def test_a_built_in_agent_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    for load in (load_agent, load_environment):
        with pytest.raises(InvalidConfig) as caught:
            load("verifiers", {**CONFIG, "limit": 2})
        assert caught.value.reason == "PACKAGE_MISSING"


def test_without_the_package_the_pip_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidConfig, match=r"dialoop-extras\[verifiers\]") as caught:
        VerifiersAgent(CONFIG)
    assert caught.value.reason == "PACKAGE_MISSING"
