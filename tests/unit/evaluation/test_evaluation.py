"""An evaluation's episodes, its folder, its numbers, and the comparison of two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import History
from dialoop.environments import load_environment
from dialoop.errors import InvalidInput, NotFound
from dialoop.local.client import LocalEnvironmentClient
from dialoop.testing import ScriptedPolicy
from dialoop_ops.evaluation import (
    EvaluationRecords,
    EvaluationResults,
    EvaluationSpec,
    PairedResults,
    evaluate,
)
from dialoop_ops.runs import RunIndex

SPEC = EvaluationSpec(environment="arithmetic", policy="scripted", num_tasks=6, num_samples=2)


def answer_of(history: History) -> str:
    """The right sum for tasks whose first number is even, else a wrong one."""
    first, _, second = history[-1].text.split("?")[0].split()[-1].partition("+")
    right = int(first) + int(second)
    return f"Result={right if int(first) % 2 == 0 else right + 1}<submit>"


async def play(run_dir: Path, policy: Any, spec: EvaluationSpec = SPEC) -> EvaluationResults:
    with EvaluationRecords.open(run_dir, spec) as records:
        async with LocalEnvironmentClient(load_environment("arithmetic")) as sessions:
            await evaluate(spec, sessions=sessions, policy=policy, records=records, concurrency=3)
        results = EvaluationResults.of(run_dir)
        mean = results.mean_reward
        records.conclude(results.as_json(), mean_reward=None if mean is None else mean.mean)
    return EvaluationResults.of(run_dir)


async def test_every_task_is_played_as_often_as_asked_and_counted_by_hand(tmp_path: Path) -> None:
    results = await play(tmp_path / "a", ScriptedPolicy(answer_of))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700, "only its owner reads it"
    assert len(results.rewards) == 6
    by_hand = {key: int(key.partition("+")[0]) % 2 == 0 for key in results.rewards}
    assert {key: all(values) for key, values in results.successes.items()} == by_hand
    share = sum(by_hand.values()) / 6
    assert 0 < share < 1
    mean, both = results.mean_reward, results.pass_at(2)
    assert mean is not None
    assert both is not None
    assert (mean.mean, both.mean, results.pass_at(3)) == (pytest.approx(share), share, None)
    written = json.loads((tmp_path / "a" / "evaluation.json").read_text())
    assert written["pass_at"].keys() == {"1", "2"}
    index = RunIndex(tmp_path / "a")  # the console reads it as it reads a run
    assert index.catch_up().num_trajectories == 12
    assert [point.value for point in index.points("evaluation/eval/mean_reward")] == [mean.mean]
    index.close()


async def test_what_is_there_is_not_played_again_and_what_failed_is(tmp_path: Path) -> None:
    calls = []

    def fails_at_first(history: History) -> str:
        calls.append(history)
        if len(calls) in (2, 3):
            raise RuntimeError("away")
        return answer_of(history)

    run_dir = tmp_path / "a"
    first = await play(run_dir, ScriptedPolicy(fails_at_first))
    assert (first.num_failed, len(calls)) == (2, 12)
    again = await play(run_dir, ScriptedPolicy(fails_at_first))
    assert (again.num_failed, len(calls)) == (0, 14)
    assert sum(map(len, again.rewards.values())) == 12


async def test_a_folder_that_is_something_else_is_kept(tmp_path: Path) -> None:
    await play(tmp_path / "a", ScriptedPolicy(answer_of))
    other = replace(SPEC, policy="another")
    with pytest.raises(InvalidInput, match="another evaluation"):
        EvaluationRecords.open(tmp_path / "a", other)
    EvaluationRecords.open(tmp_path / "a", other, fresh=True).__exit__(None, None, None)
    with pytest.raises(NotFound):
        EvaluationResults.of(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no evaluation"):
        EvaluationRecords.open(tmp_path / "run", SPEC, fresh=True)


def results_of(environment: str = "arithmetic", **rewards: float) -> EvaluationResults:
    return EvaluationResults(
        spec=replace(SPEC, environment=environment),
        rewards={key: (reward,) for key, reward in rewards.items()},
        successes={key: (reward == 1,) for key, reward in rewards.items()},
        num_failed=0,
    )


def test_two_policies_are_compared_by_task() -> None:
    ours = results_of(a=1, b=1, c=1, d=1, e=0, f=1, x=1)
    theirs = results_of(a=0, b=0, c=0, d=0, e=1, f=1, y=0)
    paired = PairedResults.of(ours, theirs)
    assert (paired.num_better, paired.num_worse, paired.num_equal) == (4, 1, 1)
    # Differences 1, 1, 1, 1, -1, 0: mean .5, variance .7, t(.975, 5) = 2.570582.
    assert paired.difference.mean == 0.5
    assert paired.difference.high == pytest.approx(0.5 + 2.570582 * (0.7 / 6) ** 0.5, abs=1e-5)
    # Of five coin tosses none or one is tails: 6 of 32, on either side.
    assert paired.p_value == pytest.approx(12 / 32)
    assert PairedResults.of(ours, ours).p_value == 1


def test_evaluations_of_other_tasks_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="environment"):
        PairedResults.of(results_of(a=1), results_of("gsm8k", a=1))
    with pytest.raises(InvalidInput, match="no task in common"):
        PairedResults.of(results_of(a=1), results_of(b=1))


@pytest.mark.parametrize("field", [{"num_tasks": -1}, {"num_samples": 0}, {"max_turns": 0}])
def test_impossible_numbers_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="Give at least"):
        EvaluationSpec(environment="arithmetic", policy="p", **field)


async def test_an_empty_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await play(tmp_path / "a", ScriptedPolicy(answer_of), replace(SPEC, split="nope"))
