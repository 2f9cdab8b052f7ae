"""A text episode as a trajectory, token by token, and the same episode played through sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dialoop import rollout
from dialoop.environments import load_environment
from dialoop.environments.episode import TaskData
from dialoop.environments.modes import Text
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.errors import InvalidConfig
from dialoop.local.client import LocalEnvironmentClient
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import DoneReason, Owner, SamplingParams, StopReason, Trajectory
from dialoop_extras.text_environment.environment import TextLimits, each
from dialoop_extras.text_environment.playing import play_text
from dialoop_extras.text_environment.setups import TextSetup, exact_result, load_text_setup
from dialoop_ops.conformance.environment.checks import check_environment

from tests.support.samples.scripted_tokens import (
    BYTES,
    LOGPROB,
    MAIN_7,
    TASK,
    ScriptedTokens,
    ids_of,
)

CALL = "<request><add>1+2<call>"
SUBMIT = "Result=3<submit>"
DATA = TaskData(key="k", question="1+2", answer="3")
TASKS = RowTasks({"train": [{"query": "1+2", "answer": "3"}]})


def add(query: str) -> str:
    first, second = query.split("+")
    return str(int(first) + int(second))


SETUP = TextSetup(
    name="sums",
    tools=[add],
    reward=each(exact_result),
    prompt="Add. ",
    query_format="{question}=",
    tasks=TASKS,
)


def twice(prompt: str) -> str:
    """A call, and after its answer the result."""
    return SUBMIT if "<response>" in prompt else CALL


async def play(
    script: Callable[[str], str] = twice, setup: TextSetup = SETUP, **options: Any
) -> Trajectory:
    options = {"data": DATA, "sampling": SamplingParams(max_new_tokens=30), **options}
    return await play_text(
        TASK, setup=setup, policy=ScriptedTokens(script), tokenizer=BYTES, group_id="g", **options
    )


async def test_the_models_tokens_are_trained_and_the_tools_are_masked() -> None:
    trajectory = await play()
    assert trajectory.failures == ()
    (sequence,) = trajectory.sequences
    parts = [("Add. 1+2=", 0), (CALL, 1), ("3<response>", 0), (SUBMIT, 1)]
    assert sequence.token_ids.tolist() == ids_of("".join(text for text, _ in parts))
    mask = [is_models for text, is_models in parts for _ in text]
    assert sequence.response_mask().astype(int).tolist() == mask
    assert [(s.source, s.turn) for s in sequence.segments] == [
        (Source.PROMPT, 0),
        (Source.MODEL, 0),
        (Source.TOOL, 0),
        (Source.MODEL, 1),
    ]
    assert sequence.inference_logprobs.tolist() == [LOGPROB] * (len(CALL) + len(SUBMIT))
    assert sequence.policy_versions == (MAIN_7,)
    # The reward is the episode's, so it stands once, at the end.
    assert [[(r.name, r.value) for r in turn.rewards] for turn in trajectory.turns] == [
        [],
        [("exact_result", 1.0)],
    ]
    assert [(t.message_start, t.num_messages, t.num_tool_calls) for t in trajectory.turns] == [
        (1, 2, 1),
        (3, 1, 0),
    ]
    roles = [(message.role, message.text) for message in trajectory.history]
    assert roles[1:3] == [("assistant", CALL), ("tool", "3<response>")]
    assert (trajectory.done_reason, trajectory.terminated) == (DoneReason.SUBMITTED, True)
    assert {turn.stop_reason for turn in trajectory.turns} == {StopReason.STOP}
    assert trajectory.sampling.stop == ("<call>", "<submit>")
    assert (trajectory.task_key, trajectory.environment_version) == ("k", "1")


def endless(prompt: str) -> str:
    return CALL


@pytest.mark.parametrize(
    ("script", "limits", "reason", "terminated", "num_turns"),
    [
        (endless, {"max_turns": 2}, DoneReason.MAX_TURNS, False, 2),
        (endless, {"max_length": 20}, DoneReason.MAX_LENGTH, False, 1),
        (lambda _: "It is 3.", {}, DoneReason.NO_CALL, True, 1),
        (lambda p: "" if "<response>" in p else CALL, {}, DoneReason.MAX_LENGTH, False, 1),
    ],
)
async def test_limits_end_an_episode_with_their_reason(
    script: Callable[[str], str],
    limits: dict[str, Any],
    reason: DoneReason,
    terminated: bool,
    num_turns: int,
) -> None:
    trajectory = await play(script, replace(SETUP, limits=TextLimits(**limits)))
    assert trajectory.failures == ()
    assert (trajectory.done_reason, trajectory.terminated) == (reason, terminated)
    assert len(trajectory.turns) == num_turns
    assert trajectory.reward == 0.0


async def test_a_long_tool_answer_is_cut_and_an_unknown_tool_is_said() -> None:
    def loud(query: str) -> str:
        return "x" * 50

    limits = TextLimits(max_tool_response=10)
    setup = replace(SETUP, tools={"add": loud}, limits=limits)
    assert "xxxxxxx...<response>" in (await play(setup=setup)).history[2].text
    unknown = await play(setup=replace(SETUP, tools={"sub": add}))
    assert "Unknown tool add.<response>" in unknown.history[2].text


def broken(*arguments: Any, **extra: Any) -> Any:
    raise KeyError("a secret")


def slow(query: str) -> str:
    time.sleep(0.3)
    return "late"


async def patient(texts: list[str]) -> list[float]:
    await asyncio.sleep(30)
    return [1.0]


def not_a_number(texts: list[str]) -> list[float]:
    return [float("nan")]


def none_at_all(texts: list[str]) -> list[float]:
    return []


def too_many(texts: list[str]) -> list[float]:
    return [1.0, 1.0]


QUICK = TextLimits(tool_timeout_s=0.02, reward_timeout_s=0.02)


@pytest.mark.parametrize(
    ("fields", "owner", "reason", "says"),
    [
        ({"tools": {"add": broken}}, Owner.TOOL, "TOOL_FAILED", "KeyError at test_text_playing"),
        ({"tools": {"add": slow}, "limits": QUICK}, Owner.TOOL, "TOOL_TIMEOUT", "tool"),
        ({"reward": broken}, Owner.REWARD, "REWARD_FAILED", "broken"),
        ({"reward": patient, "limits": QUICK}, Owner.REWARD, "REWARD_TIMEOUT", "patient"),
        ({"reward": not_a_number}, Owner.REWARD, "REWARD_NOT_FINITE", "not finite"),
        ({"reward": none_at_all}, Owner.REWARD, "REWARD_FAILED", "0 values for 1 texts"),
        ({"reward": too_many}, Owner.REWARD, "REWARD_FAILED", "2 values for 1 texts"),
    ],
)
async def test_what_an_author_wrote_fails_under_its_name_and_is_no_reward(
    fields: dict[str, Any], owner: Owner, reason: str, says: str
) -> None:
    trajectory = await play(setup=replace(SETUP, **fields))
    failure = trajectory.failures[-1]
    assert (failure.owner, failure.reason) == (owner, reason)
    assert says in failure.message
    assert "secret" not in failure.message
    assert not trajectory.is_scorable
    if owner is Owner.REWARD:
        scores = await replace(SETUP, **fields).as_environment().score(DATA, trajectory)
        assert scores[-1].rewards == ()
        assert [(f.owner, f.reason) for f in scores[-1].failures] == [(owner, reason)]


async def test_a_prompt_that_fills_the_context_is_nobodys_reward_of_zero() -> None:
    trajectory = await play(lambda _: "")
    assert trajectory.failures[0].reason == "CONTEXT_FULL"
    assert trajectory.failures[0].owner is Owner.ENVIRONMENT


async def test_an_episode_that_takes_too_long_fails() -> None:
    async def sleepy(query: str) -> str:
        await asyncio.sleep(30)
        return ""

    trajectory = await play(setup=replace(SETUP, tools={"add": sleepy}), time_limit_s=0.05)
    assert trajectory.failures[0].reason == "EPISODE_TIMED_OUT"


async def test_async_tools_and_rewards_that_take_lists_play_too() -> None:
    async def slowly(query: str) -> str:
        await asyncio.sleep(0)
        return add(query)

    async def exact(texts: list[str], answers: list[str], difficulty: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(answers == ["3"]) * float(difficulty[0]) for _ in texts]

    data = replace(DATA, metadata={"difficulty": "0.5", "unused": "x"})
    setup = replace(SETUP, tools={"add": slowly}, reward=exact)
    assert (await play(setup=setup, data=data)).reward == 0.5


def test_a_reward_that_takes_what_tasks_do_not_have_is_refused() -> None:
    def exact(text: str, truth: str) -> float:
        return float(truth in text)

    with pytest.raises(InvalidConfig, match="'truth'") as caught:
        replace(SETUP, reward=each(exact)).as_environment()
    assert "answers" in caught.value.remedy
    assert replace(SETUP, reward=max).extra_of(DATA) == {}  # a function without a signature
    with pytest.raises(InvalidConfig, match="query_format"):
        replace(SETUP, query_format="no place")


async def test_sessions_play_the_same_episode_as_run() -> None:
    environment = SETUP.as_environment()
    async with LocalEnvironmentClient(environment) as client:
        await client.create_session("s", "sums")
        opening = await client.reset("s", episode=1, split="train", task_key=TASKS.keys("train")[0])
        assert opening.text is not None
        outcomes = []
        for index, text in enumerate((CALL, SUBMIT)):
            answer = Text(response=text)
            outcomes.append(await client.step("s", episode=1, step_index=index, history=answer))
    trajectory = await play()
    assert opening.text.prompt == trajectory.history[0].text
    assert outcomes[-1].text is not None
    assert outcomes[-1].text.prompt == "".join(message.text for message in trajectory.history)
    assert [o.rewards for o in outcomes] == [turn.rewards for turn in trajectory.turns]
    assert [o.done for o in outcomes] == [False, True]
    assert outcomes[-1].done_reason is trajectory.done_reason
    scores = await environment.score(DATA, trajectory)
    assert [score.rewards for score in scores] == [turn.rewards for turn in trajectory.turns]


async def test_a_rollout_of_messages_says_what_plays_a_text_environment() -> None:
    async with LocalEnvironmentClient(SETUP.as_environment()) as client:
        task = replace(TASK, environment="sums", key=TASKS.keys("train")[0])
        trajectory = await rollout.play(task, sessions=client, policy=ScriptedPolicy(["3"]))
    assert trajectory.failures[0].reason == "HISTORY_MODE_ONLY"
    assert "play_text" in trajectory.failures[0].message


async def test_the_check_names_a_reward_that_is_no_number_and_what_to_return() -> None:
    environment = replace(SETUP, tools=None, reward=not_a_number).as_environment()
    findings = await check_environment(environment, num_tasks=1)
    (wrong,) = (finding for finding in findings if not finding.is_ok)
    assert "not_a_number returned a number that is not finite" in wrong.problem
    assert "Return a finite number" in wrong.remedy


async def test_the_built_in_calculator_passes_every_check_of_an_environment() -> None:
    findings = await check_environment(load_environment("calculator"), num_tasks=1)
    assert [finding for finding in findings if not finding.is_ok] == []


def test_a_text_setup_is_loaded_by_its_path_and_options() -> None:
    environment = load_environment("calculator", {"operations": "-"})
    assert "-" in environment.tasks.keys("train")[0]
    setup = load_text_setup("calculator")
    data = setup.tasks.get("train", "35+41")
    assert setup.query_of(data) == "What is 35+41?\n"
    assert setup.extra_of(data) == {"answers": ["76"]}
