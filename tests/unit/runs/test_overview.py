"""The overview of a run: its figures are its files', and its verdict is no stronger than they."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from dialoop_ops.runs import RunIndex
from dialoop_ops.runs.intervals import gain_of, wilson_interval
from dialoop_ops.runs.overview import FALLS, RISES, UNCLEAR, UNKNOWN, Overview, overview_of
from dialoop_services.config.job import JobConfig

NUM_TASKS = 12


def answer(label: str, step: int, task: int, reward: float, **fields: Any) -> dict[str, Any]:
    """Return a line of trajectories.jsonl: what an evaluation heard."""
    return {
        "outcome": "evaluation",
        "label": label,
        "train_step": step,
        "trajectory_id": f"{label}-{task}",
        "task_key": f"t{task}",
        "reward": reward,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"task {task}"},
            {"role": "assistant", "content": f"{label} says {reward}"},
        ],
        "sequences": [],
    } | fields


def step(number: int, **fields: Any) -> dict[str, Any]:
    head = {"kind": "train", "time": 100.0 + number, "train_step": number, "lineage": "main"}
    seconds = {"lease_s": 2.0 * number, "train_s": 1.0, "publish_s": 0.5}
    return head | {"policy_version": number + 1, "reward": number / 10} | seconds | fields


def write_run(
    folder: Path, rows: list[dict[str, Any]], metrics: list[dict[str, Any]], **config: Any
) -> RunIndex:
    folder.mkdir()
    for name, lines in (("trajectories.jsonl", rows), ("metrics.jsonl", metrics)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = JobConfig.model_validate(config).model_dump(mode="json")
    (folder / "run.json").write_text(json.dumps({"run_id": "r", "started": 90, "config": whole}))
    index = RunIndex(folder)
    index.catch_up()
    return index


def evaluated(folder: Path, before: list[float], after: list[float]) -> Overview:
    """Return the overview of a run of three steps with an evaluation at either end."""
    rows, metrics = [], [step(1), step(2), step(3)]
    for label, number, rewards in (("before_sampled", 0, before), ("after_sampled", 3, after)):
        rows += [answer(label, number, task, reward) for task, reward in enumerate(rewards)]
        mean = {"mean_reward": fmean(rewards), "num_trajectories": len(rewards)}
        head = {"kind": "evaluation", "time": 110.0, "lineage": "main", "policy_version": number}
        metrics.append(head | {"train_step": number, "label": label} | mean)
    return overview_of(write_run(folder, rows, metrics))


def test_the_change_has_the_interval_of_its_pairs_and_the_curve_that_of_each_evaluation(tmp_path):
    before = [0.0] * 8 + [1.0] * 4
    after = [0.0] * 2 + [1.0] * 10
    learning = evaluated(tmp_path / "run", before, after).learning
    pairs = gain_of([after[task] - before[task] for task in range(NUM_TASKS)])
    assert (learning.of, learning.verdict) == ("held-out reward, sampled", RISES)
    assert (learning.before, learning.after) == (fmean(before), fmean(after))
    assert learning.num_pairs == NUM_TASKS
    assert (learning.low, learning.high) == pytest.approx((pairs.low, pairs.high))
    (points,) = learning.evaluations.values()
    assert [(p.label, p.train_step, p.value) for p in points] == [
        ("before_sampled", 0, fmean(before)),
        ("after_sampled", 3, fmean(after)),
    ]
    assert (points[0].low, points[0].high) == wilson_interval(fmean(before), NUM_TASKS)
    assert learning.training == ((1, 0.1), (2, 0.2), (3, 0.3))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0.0] * 12, [0.0] * 11 + [1.0], UNCLEAR),
        ([1.0] * 12, [0.0] * 10 + [1.0] * 2, FALLS),
        ([0.5] * 12, [0.5] * 12, UNCLEAR),
        ([0.0], [1.0], UNCLEAR),
        ([-3.0] * 4, [-1.0, -1.5, -1.0, -1.2], RISES),
    ],
)
def test_the_verdict_is_no_stronger_than_its_interval(before, after, verdict, tmp_path):
    assert evaluated(tmp_path / "run", before, after).learning.verdict == verdict


def test_without_evaluations_the_first_steps_are_compared_with_the_last(tmp_path):
    metrics = [step(number) for number in range(1, 21)]
    rows = [
        answer("training", number, number % 8, float(number), outcome="trained")
        for number in range(1, 21)
    ]
    shown = overview_of(write_run(tmp_path / "run", rows, metrics))
    of = "training reward, mean of the first 5 and the last 5 points"
    assert (shown.learning.of, shown.learning.verdict) == (of, RISES)
    assert (shown.learning.before, shown.learning.after) == pytest.approx((0.3, 1.8))
    # Tasks 1 to 5 were played in steps 1 to 5, and 0 to 4 in steps 16 to 20.
    answers = [(a.task_key, a.before and a.before.reward, a.after.reward) for a in shown.answers]
    assert answers == [("t1", 1.0, 17.0), ("t3", 3.0, 19.0), ("t4", 4.0, 20.0)]


def test_where_no_task_was_answered_twice_the_newest_answers_are_shown(tmp_path):
    rows = [
        answer("training", number, number, number / 20, outcome="trained") for number in (1, 2, 3)
    ]
    shown = overview_of(write_run(tmp_path / "run", rows, [step(1), step(2), step(3)]))
    assert [(a.kind, a.before, a.after.reward) for a in shown.answers] == [("newest", None, 0.15)]
    only = {"kind": "evaluation", "time": 1.0, "train_step": 0, "label": "before_sampled"}
    only |= {"mean_reward": 0.5, "num_trajectories": 3, "lineage": "main", "policy_version": 1}
    heard = [answer("before_sampled", 0, task, task / 2) for task in range(3)]
    shown = overview_of(write_run(tmp_path / "begun", heard, [only]))
    assert [(a.kind, a.after.reward) for a in shown.answers] == [
        ("best", 1.0),
        ("in the middle", 0.5),
        ("worst", 0.0),
    ]


@pytest.mark.parametrize(("heldout", "verdict"), [(2.0, FALLS), (5.0, UNCLEAR)])
def test_of_a_run_without_rewards_the_losses_are_shown(heldout, verdict, tmp_path):
    head = {"time": 1.0, "lineage": "main", "policy_version": 1}
    rows = [head | {"kind": "warm_start", "train_step": 10, "loss": 9.0}]
    rows += [head | {"kind": "train", "train_step": n, "loss": 3.0 - n / 10} for n in range(1, 13)]
    rows += [
        head | {"kind": "heldout", "train_step": n, "loss": loss}
        for n, loss in ((6, 4.0), (12, heldout))
    ]
    learning = overview_of(write_run(tmp_path / "run", [], rows)).learning
    assert (learning.is_loss, learning.verdict, learning.num_pairs) == (True, verdict, 0)
    assert learning.of.startswith("training loss")
    assert (learning.before, learning.after) == pytest.approx((2.7, 2.0))
    (points,) = learning.evaluations.values()
    assert [(p.train_step, p.value, p.low) for p in points] == [(6, 4.0, None), (12, heldout, None)]


def test_a_run_that_has_nothing_yet_says_so(tmp_path):
    shown = overview_of(write_run(tmp_path / "run", [], []))
    assert (shown.learning.verdict, shown.learning.before) == (UNKNOWN, None)
    assert (shown.answers, shown.parts, shown.wall_s, shown.has_ended) == ((), (), None, False)
    assert {check.holds for check in shown.checks if check.name != "failures of episodes"} == {None}


def test_a_mean_step_s_seconds_are_those_of_the_metrics(tmp_path):
    shown = evaluated(tmp_path / "run", [0.0], [1.0])
    assert {part.name: part.seconds for part in shown.parts} == {
        "waits for groups": 4.0,
        "computes": 1.0,
        "publishes": 0.5,
    }
    assert (shown.num_train_steps, shown.max_train_steps) == (3, JobConfig().train.num_steps)
    assert shown.wall_s == 20.0
    beside = [step(1, capture_s=0.25)]
    parts = overview_of(write_run(tmp_path / "beside", [], beside)).parts
    assert [part.name for part in parts] == ["waits for groups", "computes", "copies the weights"]


def test_the_answers_are_those_whose_rewards_changed_most(tmp_path):
    before = [0.5, 0.0, 1.0, 0.5]
    shown = evaluated(tmp_path / "run", before, [0.6, 1.0, 0.0, 0.5])
    assert [(a.kind, a.task_key) for a in shown.answers] == [
        ("gained most", "t1"),
        ("unchanged", "t3"),
        ("lost most", "t2"),
    ]
    best = shown.answers[0]
    assert [m["content"] for m in best.prompt] == ["be brief", "task 1"]
    assert [m["content"] for m in best.before.messages] == ["before_sampled says 0.0"]
    assert (best.after.label, best.after.number, best.after.reward) == ("after_sampled", 6, 1.0)


def test_settings_are_those_that_differ_from_the_defaults(tmp_path):
    index = write_run(tmp_path / "run", [], [], run="mine", train={"loss": "grpo", "num_steps": 7})
    assert [(s.key, s.value, s.default) for s in overview_of(index).settings] == [
        ("train.num_steps", "7", str(JobConfig().train.num_steps)),
        ("train.loss", '"grpo"', json.dumps(JobConfig().train.loss)),
    ]


def test_what_does_not_hold_is_named(tmp_path):
    publish = {"kind": "publish", "time": 1.0, "train_step": 0, "lineage": "main"}
    publish |= {"policy_version": 1, "max_logprob_difference": math.nan}
    mismatch = {"fresh_mismatch_kl": 0.5, "fresh_mismatch_alarm": True, "staleness_max": 3}
    failed = answer("training", 1, 0, 0.0, failures=[{"owner": "TOOL"}], outcome="trained")
    index = write_run(
        tmp_path / "run", [failed], [publish, step(1, **mismatch)], train={"max_staleness": 2}
    )
    summary = {"accounting": {"ledger_adds_up": False}, "gates": {"fast": False, "good": True}}
    summary |= {"num_restarts": {"trainer": 2, "scorer": 0}}
    (index.run_dir / "summary.json").write_text(json.dumps(summary))
    shown = overview_of(index)
    assert shown.has_ended
    assert {check.name: (check.holds, check.says) for check in shown.checks} == {
        "alarms": (False, "fresh mismatch after train steps 1"),
        "trainer and engine agree": (False, "mismatch KL at most 0.5 nats, bound 0.01"),
        "published weights are served": (False, "log-probs differ by nan nats"),
        "staleness": (False, "at most 3 versions, bound 2"),
        "ledger": (False, "does not add up"),
        "failures of episodes": (None, "1 of tool"),
        "restarts": (None, "trainer 2"),
        "gates": (False, "1 of 2 hold; not: fast"),
    }


def test_what_each_episode_of_a_trial_earned_is_a_curve(tmp_path):
    metrics = [
        step(number, trial_reward={"1": 0.1, "2": number / 10, "3": number / 5})
        for number in range(1, 4)
    ]
    after = {"kind": "evaluation", "time": 1.0, "train_step": 3, "label": "after_greedy"}
    after |= {
        "mean_reward": 0.5,
        "num_trajectories": 2,
        "trial_reward/1": 0.25,
        "trial_reward/2": 1,
    }
    trials = overview_of(write_run(tmp_path / "run", [], [*metrics, after])).learning.trials
    assert trials == {
        "first train steps": (0.1, 0.1, 0.2),
        "last train steps": (0.1, 0.3, pytest.approx(0.6)),
        "after_greedy": (0.25, 1.0),
    }
