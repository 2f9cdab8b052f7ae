"""A task that is answered once is over after the answer; only a cut-off answer is truncated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import Message
from dialoop.environments import load_environment
from dialoop.rollout import play
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy
from dialoop.trajectory import DoneReason, SamplingParams, Task
from dialoop_services.trainer.data.batches import TrajectoryFigures, metrics_of

_CHAT = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
_ROWS: Mapping[str, Mapping[str, Any]] = {
    "trl": {"prompt": _CHAT[:1]},
    "messages": {"messages": _CHAT},
    "verl": {"data_source": "sums", "prompt": _CHAT[:1], "reward_model": {"ground_truth": "5"}},
    "dialoop.tasks.gsm8k:gsm8k": {"question": "2+3?", "answer": "#### 5"},
    "dialoop.tasks.maths:maths": {"problem": "2+3?", "answer": "5"},
    "dialoop.tasks.ifeval:ifeval": {
        "key": 7,
        "prompt": "Use no commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
}
_REWARD = {
    "trl": {"reward_funcs": [f"{__name__}:constant"]},
    "verl": {"compute_score": f"{__name__}:score"},
}
_FILE_OPTION = {"trl": "dataset", "verl": "train_files"}
_OWN_TASKS: Mapping[str, Mapping[str, Any]] = {
    "dialoop.tasks.countdown:countdown": {},
    "dialoop.tasks.column_addition:column_addition": {},
    "dialoop.tasks.reasoning_gym:reasoning_gym": {"task": "basic_arithmetic", "num_tasks": 4},
}


def constant(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


@pytest.fixture(params=[*_ROWS, *_OWN_TASKS])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    use = request.param
    if use in _OWN_TASKS:
        if "reasoning_gym" in use:
            pytest.importorskip("reasoning_gym")
        return load_environment(use, _OWN_TASKS[use])
    (tmp_path / "rows.jsonl").write_text(json.dumps(_ROWS[use]) + "\n", "utf-8")
    options = {_FILE_OPTION.get(use, "path"): str(tmp_path / "rows.jsonl")}
    options |= _REWARD.get(use, {})
    return load_environment(use, options)


@pytest.mark.parametrize("text", ["5", "<answer>5</answer>", ""])
async def test_an_answer_ends_the_task_as_terminated(environment: Any, text: str) -> None:
    answer = Message(role="assistant", content=text)
    opening = environment.reset(_first_task(environment), seed=0)
    outcome = await environment.step(opening.episode, opening.history.respond(answer))
    assert (outcome.episode.terminated, outcome.episode.truncated) == (True, False)
    assert outcome.episode.done_reason is DoneReason.CONTENT
    assert environment.traits.max_turns == 1


async def test_an_answer_that_was_cut_off_is_truncated(environment: Any) -> None:
    answer = Message(role="assistant", content="5", is_complete=False)
    opening = environment.reset(_first_task(environment), seed=0)
    outcome = await environment.step(opening.episode, opening.history.respond(answer))
    assert (outcome.episode.terminated, outcome.episode.truncated) == (False, True)
    assert outcome.episode.done_reason is DoneReason.INCOMPLETE


def _first_task(environment: Any) -> Any:
    return environment.tasks.get("train", environment.tasks.keys("train")[0])


async def test_the_metric_counts_the_answers_that_were_cut_off_alone() -> None:
    environment = load_environment("dialoop.tasks.column_addition:column_addition")
    task = Task(task_id="t", environment=environment.name, split="train", key="35+47")
    figures = []
    for max_new_tokens in (3, 64, 64, 64):
        played = await play(
            task,
            sessions=InMemoryEnvironment(environment),
            policy=ScriptedPolicy(["#### 82"]),
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
        )
        figures.append(TrajectoryFigures.of(played))
    metrics = metrics_of(figures)
    assert (metrics["truncated_share"], metrics["reward"]) == (0.25, 0.75)
