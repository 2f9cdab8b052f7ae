"""A run at a glance: is it learning, is it sound, what does it wait for, what does it say.

`overview_of(RunIndex(Path("runs/demo")))` is what the console, `dialoop watch` and `dialoop report`
show first. Each figure is one of metrics.jsonl or summary.json; intervals are made of the rewards
of the trajectories.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dialoop_services.config.job import JobConfig

from dialoop_ops.runs.intervals import Interval, difference_of, gain_of, mean_of, wilson_interval
from dialoop_ops.runs.run_config import SUMMARY_FILE, flat, flat_config, read_object, read_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop_ops.runs.index import Point, RunIndex

RISES, FALLS, UNCLEAR, UNKNOWN = "rises", "falls", "unclear", "unknown"
EVALUATIONS = {
    "held-out reward, sampled": ("before_sampled", "running", "after_sampled"),
    "held-out reward, greedy": ("before_greedy", "after_greedy"),
}
"""Curve -> its evaluations in the order of a run."""
_TRAINING = "train/reward"
_LOSSES = {"train/loss": "training loss", "warm_start/loss": "warm-start loss"}
"""What is shown of a run that has no reward (yet): the first of these."""
_HELDOUT_LOSS = "heldout/loss"
_SIDE = 5
"""Without evaluations, so many of the first train steps are compared with as many of the last."""
_PARTS = {
    "lease": "waits for groups",
    "rows": "reads them",
    "train": "computes",
    "wait": "waits for the publish before",
    "capture": "copies the weights",
    "publish": "publishes",
    "keep": "keeps what replay needs",
}
"""What a train step's seconds go to, by the name in metrics.jsonl."""
_BESIDE = ("publish", "keep")
"""Parts that run beside the next step where weights are captured first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation: its mean reward and its 95 % interval, None for rewards beyond 0..1."""

    label: str
    train_step: int
    value: float
    low: float | None
    high: float | None
    num_trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether the reward rises, by how much, and of what: `low` and `high` are of the change.

    `verdict` is "rises" or "falls" where 0 lies outside of the interval, "unclear" inside of it,
    and "unknown" where nothing can be compared. `is_loss`: the run has no reward, and its figures
    are losses in nats a token, which have to fall. `trials`: mean reward of each episode of a
    trial, by evaluation, or of the first and last train steps.
    """

    verdict: str
    is_loss: bool
    of: str
    before: float | None
    after: float | None
    low: float | None
    high: float | None
    num_pairs: int
    evaluations: Mapping[str, tuple[Evaluated, ...]]
    training: tuple[tuple[int, float], ...]
    trials: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to look at. `holds` is None while it is not known, or for a person to judge."""

    name: str
    holds: bool | None
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """What the mean train step spends `seconds` on."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnswer:
    """What a policy said to a task: `number` is the trajectory's."""

    number: int
    label: str
    reward: float | None
    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A task, and what the policy said to it before and after. `kind`: why it is shown.

    `before` is None where no task was answered twice.
    """

    kind: str
    task_key: str
    prompt: tuple[Mapping[str, Any], ...]
    before: PolicyAnswer | None
    after: PolicyAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of the config that is not the default; both as JSON."""

    key: str
    value: str
    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run at a glance. `wall_s`: from the start to the last row of metrics.jsonl."""

    has_ended: bool
    num_train_steps: int
    max_train_steps: int
    num_trajectories: int
    wall_s: float | None
    learning: Learning
    checks: tuple[Check, ...]
    parts: tuple[StepPart, ...]
    answers: tuple[Answered, ...]
    settings: tuple[Setting, ...]


def overview_of(index: RunIndex) -> Overview:
    """Return the overview of a run, as far as its index has it."""
    config = flat_config(index.run_dir)
    summary = read_object(index.run_dir / SUMMARY_FILE)
    steps = index.points(_TRAINING) or index.points("train/loss")
    started, newest = read_run(index.run_dir).get("started"), index.last_time()
    return Overview(
        has_ended=bool(summary),
        num_train_steps=steps[-1].train_step if steps else 0,
        max_train_steps=int(json.loads(config.get("train.num_steps", "0"))),
        num_trajectories=index.progress().num_trajectories,
        wall_s=newest - started if newest and started else None,
        learning=_learning_of(index),
        checks=_checks_of(index, config, summary),
        parts=parts_of(index),
        answers=_answers_of(index),
        settings=_settings_of(config),
    )


# -- is it learning


def _learning_of(index: RunIndex) -> Learning:
    evaluations = {
        name: found for name, labels in EVALUATIONS.items() if (found := _evaluated(index, labels))
    }
    training = _values_of(index, _TRAINING)
    if not (evaluations or training):
        return _learning_of_losses(index)
    name, before, after = _ends_of(evaluations)
    change: Interval | None = None
    ends: tuple[float | None, float | None]
    if before and after:
        change = _change_of(
            *(
                index.rewards_by_task(each.label, each.train_step, each.train_step)
                for each in (before, after)
            )
        )
        ends = (before.value, after.value)
    elif len(training) > 1 and not evaluations:
        name, ends, change = _ends_of_steps("training reward", training)
    else:
        ends = (before.value if before else None, None)
    low, high = _around(ends, change)
    return Learning(
        verdict=_verdict(ends, low, high),
        is_loss=False,
        of=name,
        before=ends[0],
        after=ends[1],
        low=low,
        high=high,
        num_pairs=change.num_values if before and after and change else 0,
        evaluations=evaluations,
        training=training,
        trials=_trials_of(index),
    )


def _learning_of_losses(index: RunIndex) -> Learning:
    """Return what a run without rewards has: SFT's losses, or a warm start's."""
    name, training = next(
        ((name, values) for key, name in _LOSSES.items() if (values := _values_of(index, key))),
        ("", ()),
    )
    ends: tuple[float | None, float | None] = (None, None)
    change: Interval | None = None
    if len(training) > 1:
        name, ends, change = _ends_of_steps(name, training)
    heldout = tuple(
        Evaluated(
            label="heldout", train_step=step, value=v, low=None, high=None, num_trajectories=0
        )
        for step, v in _values_of(index, _HELDOUT_LOSS)
    )
    low, high = _around(ends, change)
    verdict = _verdict(ends, low, high)
    if verdict == FALLS and heldout and heldout[-1].value > heldout[0].value:
        verdict = UNCLEAR  # what it learns does not hold for other demonstrations
    return Learning(
        verdict=verdict,
        is_loss=bool(training or heldout),
        of=name,
        before=ends[0],
        after=ends[1],
        low=low,
        high=high,
        num_pairs=0,
        evaluations={"held-out loss": heldout} if heldout else {},
        training=training,
        trials={},
    )


def _values_of(index: RunIndex, name: str) -> tuple[tuple[int, float], ...]:
    return tuple((point.train_step, point.value) for point in index.points(name))


def _ends_of_steps(
    name: str, training: Sequence[tuple[int, float]]
) -> tuple[str, tuple[float, float], Interval]:
    """Return what is compared, the means of the first and the last rows, and their difference."""
    values = [value for _, value in training]
    side = min(_SIDE, len(values) // 2)
    first, last = values[:side], values[-side:]
    of = f"{name}, mean of the first {side} and the last {side} points"
    return of, (fmean(first), fmean(last)), difference_of(last, first)


def _evaluated(index: RunIndex, labels: Sequence[str]) -> tuple[Evaluated, ...]:
    found = []
    for label in labels:
        counts = {p.row: p.value for p in index.points(f"evaluation/{label}/num_trajectories")}
        for point in index.points(f"evaluation/{label}/mean_reward"):
            low, high = band_of(point.value, counts.get(point.row, 0.0))
            found.append(
                Evaluated(
                    label=label,
                    train_step=point.train_step,
                    value=point.value,
                    low=low,
                    high=high,
                    num_trajectories=int(counts.get(point.row, 0)),
                )
            )
    return tuple(found)


def band_of(mean: float, count: float) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean reward of `count` trajectories; two None beyond 0..1.

    It is Wilson's interval for a share. Rewards between 0 and 1 have at most a share's variance, so
    for them it is no narrower than it has to be.
    """
    is_share = 0.0 <= mean <= 1.0 and count >= 1.0 and math.isfinite(count)
    return wilson_interval(mean, count) if is_share else (None, None)


def _ends_of(
    evaluations: Mapping[str, tuple[Evaluated, ...]],
) -> tuple[str, Evaluated | None, Evaluated | None]:
    """Return the first curve with two ends, and these; else the first curve's begin."""
    for name, points in evaluations.items():
        if len(points) > 1 and points[0].label.startswith("before_"):
            return name, points[0], points[-1]
    for name, points in evaluations.items():
        return name, points[0], None
    return "", None, None


def _change_of(
    before: Mapping[str, tuple[int, float]], after: Mapping[str, tuple[int, float]]
) -> Interval | None:
    """Return the mean change over the tasks of both; None without any."""
    changes = [after[task][1] - before[task][1] for task in after if task in before]
    rewards = [reward for side in (before, after) for _, reward in side.values()]
    of = gain_of if all(0.0 <= reward <= 1.0 for reward in rewards) else mean_of
    return of(changes) if changes else None


def _around(
    ends: tuple[float | None, float | None], change: Interval | None
) -> tuple[float | None, float | None]:
    """Return the interval of the change, around the difference of the two means."""
    before, after = ends
    if change is None or change.low is None or change.high is None or before is None:
        return None, None
    middle = (after or 0.0) - before
    return middle + change.low - change.mean, middle + change.high - change.mean


def _verdict(ends: tuple[Any, Any], low: float | None, high: float | None) -> str:
    if None in ends:
        return UNKNOWN
    if low is None or high is None or low <= 0.0 <= high:
        return UNCLEAR
    return RISES if low > 0.0 else FALLS


def _trials_of(index: RunIndex) -> dict[str, tuple[float, ...]]:
    """Return the mean reward of the first, second, ... episode of a trial."""
    names = [name for name in index.metric_names() if "/trial_reward/" in name]
    curves: dict[str, list[tuple[int, tuple[Point, ...]]]] = {}
    for name in names:
        kind, _, number = name.partition("/trial_reward/")
        curves.setdefault(kind.removeprefix("evaluation/"), []).append(
            (int(number), index.points(name))
        )
    trials: dict[str, tuple[float, ...]] = {}
    for kind, columns in curves.items():
        episodes = [points for _, points in sorted(columns) if points]
        if kind == "train" and episodes:
            side = min(_SIDE, max(1, len(episodes[0]) // 2))
            trials["first train steps"] = tuple(fmean(p.value for p in e[:side]) for e in episodes)
            trials["last train steps"] = tuple(fmean(p.value for p in e[-side:]) for e in episodes)
        elif episodes:
            trials[kind] = tuple(points[-1].value for points in episodes)
    return trials


# -- is it sound


def _checks_of(
    index: RunIndex, config: Mapping[str, str], summary: Mapping[str, Any]
) -> tuple[Check, ...]:
    accounting = summary.get("accounting", {})
    ledger = all(v for v in accounting.values() if isinstance(v, bool)) if accounting else None
    ends = "every trajectory is accounted for" if ledger else "does not add up"
    gates = summary.get("gates", {})
    failed = [name for name, holds in gates.items() if not holds]
    restarts = {name: n for name, n in summary.get("num_restarts", {}).items() if n}
    failures = index.count_failures()
    told = ", ".join(f"{n} of {owner.lower()}" for owner, n in failures.items())
    return (
        _alarms(index),
        _mismatch(index, config),
        _proof(index, config),
        _staleness(index, config),
        Check(name="ledger", holds=ledger, says="counted at the end" if ledger is None else ends),
        Check(name="failures of episodes", holds=None if failures else True, says=told or "none"),
        Check(
            name="restarts",
            holds=True if summary and not restarts else None,
            says=", ".join(f"{k} {n}" for k, n in restarts.items())
            or ("none" if summary else "counted at the end"),
        ),
        Check(
            name="gates",
            holds=not failed if gates else None,
            says=f"{len(gates) - len(failed)} of {len(gates)} hold"
            + (f"; not: {'; '.join(failed)}" if failed else "")
            if gates
            else "checked at the end",
        ),
    )


def _alarms(index: RunIndex) -> Check:
    points = index.points("train/fresh_mismatch_alarm")
    steps = [str(point.train_step) for point in points if point.value]
    says = f"fresh mismatch after train steps {', '.join(steps)}" if steps else "none"
    says = says if points else "not measured yet"
    return Check(name="alarms", holds=not steps if points else None, says=says)


def _mismatch(index: RunIndex, config: Mapping[str, str]) -> Check:
    values = [abs(point.value) for point in index.points("train/fresh_mismatch_kl")]
    return _bounded(
        "trainer and engine agree",
        values,
        _number(config, "train.objective.max_fresh_mismatch_kl"),
        "mismatch KL at most",
        " nats",
    )


def _proof(index: RunIndex, config: Mapping[str, str]) -> Check:
    values = [point.value for point in index.points("publish/max_logprob_difference")]
    return _bounded(
        "published weights are served",
        values,
        _number(config, "gates.logprob_difference_at_most"),
        "log-probs differ by",
        " nats",
    )


def _staleness(index: RunIndex, config: Mapping[str, str]) -> Check:
    values = [point.value for point in index.points("train/staleness_max")]
    bound = _number(config, "train.max_staleness")
    return _bounded("staleness", values, bound, "at most", " versions")


def _bounded(
    name: str, values: Sequence[float], bound: float | None, what: str, unit: str
) -> Check:
    if not values:
        return Check(name=name, holds=None, says="not measured yet")
    largest = math.nan if any(map(math.isnan, values)) else max(values)
    limit = "" if bound is None else f", bound {bound:g}"
    holds = math.isfinite(largest) if bound is None else largest <= bound
    return Check(name=name, holds=holds, says=f"{what} {largest:.3g}{unit}{limit}")


def _number(config: Mapping[str, str], key: str) -> float | None:
    value = json.loads(config.get(key, "null"))
    return float(value) if isinstance(value, (int, float)) else None


# -- what does it wait for


def parts_of(index: RunIndex) -> tuple[StepPart, ...]:
    """Return what the mean train step spends its seconds on, without what runs beside the next."""
    seconds = {part: [p.value for p in index.points(f"train/{part}_s")] for part in _PARTS}
    left_out = _BESIDE if seconds["capture"] else ()
    return tuple(
        StepPart(name=_PARTS[part], seconds=fmean(values))
        for part, values in seconds.items()
        if values and part not in left_out
    )


# -- what does it say


def _answers_of(index: RunIndex) -> tuple[Answered, ...]:
    """Return the task whose reward changed most for the better, a middle one, and the worst.

    Where none was answered twice, these are of the newest answers.
    """
    before, after = _rewards_before_and_after(index)
    changes = {task: after[task][1] - before[task][1] for task in after if task in before}
    values = changes or {task: reward for task, (_, reward) in after.items()}
    # Tasks of one value stay in the order of the run.
    ranked = sorted(values.items(), key=itemgetter(1), reverse=True)
    places = sorted({0, len(ranked) // 2, len(ranked) - 1}) if ranked else []
    kind = _kind_of_change if changes else _kind_of_answer
    return tuple(
        _answered(
            index,
            kind(place, [value for _, value in ranked]),
            task,
            before[task][0] if changes else None,
            after[task][0],
        )
        for place in places
        for task, _ in (ranked[place],)
    )


def _rewards_before_and_after(
    index: RunIndex,
) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]]]:
    """Return by task the first answer and the mean reward of both ends of a run.

    The ends are the first and the newest evaluation; while there is one at the most, the first and
    the last train steps; before these, the only evaluation.
    """

    def evaluated(end: Evaluated) -> dict[str, tuple[int, float]]:
        return index.rewards_by_task(end.label, end.train_step, end.train_step)

    greedy_first = dict(reversed(EVALUATIONS.items()))
    evaluations = {name: _evaluated(index, labels) for name, labels in greedy_first.items()}
    _, first, last = _ends_of({name: found for name, found in evaluations.items() if found})
    if first and last:
        return evaluated(first), evaluated(last)
    steps = [step for step, _ in _values_of(index, _TRAINING)]
    if not steps:
        return {}, evaluated(first) if first else {}
    side = min(_SIDE, len(steps) // 2)
    newest = index.rewards_by_task(None, steps[-max(1, side)], steps[-1])
    return (index.rewards_by_task(None, steps[0], steps[side - 1]) if side else {}), newest


def _kind_of_answer(place: int, rewards: Sequence[float]) -> str:
    if rewards[0] == rewards[-1]:
        return "newest"
    return "best" if place == 0 else "worst" if place == len(rewards) - 1 else "in the middle"


def _kind_of_change(place: int, changes: Sequence[float]) -> str:
    change = changes[place]
    if not change:
        return "unchanged"
    if place == 0:
        return "gained most" if change > 0 else "lost least"
    if place == len(changes) - 1:
        return "lost most" if change < 0 else "gained least"
    return "in the middle"


def _answered(index: RunIndex, kind: str, task: str, before: int | None, after: int) -> Answered:
    prompt, newest = _answer_of(index, after)
    earlier = None if before is None else _answer_of(index, before)[1]
    return Answered(kind=kind, task_key=task, prompt=prompt, before=earlier, after=newest)


def _answer_of(index: RunIndex, number: int) -> tuple[tuple[Mapping[str, Any], ...], PolicyAnswer]:
    """Return the messages before the policy's first one, and what follows."""
    summary, messages = index.summary(number), index.row(number).get("messages", [])
    begin = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    answer = PolicyAnswer(
        number=number,
        label=summary.label,
        reward=summary.reward,
        messages=tuple(messages[begin:]),
    )
    return tuple(messages[:begin]), answer


# -- what was set


def _settings_of(config: Mapping[str, str]) -> tuple[Setting, ...]:
    defaults = dict(flat(JobConfig().model_dump(mode="json")))
    return tuple(
        Setting(key=key, value=value, default=defaults[key])
        for key, value in config.items()
        if key != "run" and defaults.get(key, value) != value
    )
