"""Reward functions, and the transform that calls them.

def brevity(episode: Episode) -> float:
    return 1 / (1 + len(episode.answer_text))

Rewards([ExactResult(), NamedReward(brevity, weight=0.1)])
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from dialoop.chat import History, Message
from dialoop.environments.episode import Episode, Score, TaskData
from dialoop.environments.modes import RewardShape
from dialoop.environments.tasks.source import TaskSource
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward
from dialoop.user_functions import TimeIsUp, call, call_now, is_async, name_of, raised_at


class RewardFunction(Protocol):
    """A named reward. A plain function is one too, with weight 1. It may be async."""

    @property
    def name(self) -> str:
        """Return the name of the reward."""

    @property
    def weight(self) -> float:
        """Return the factor of its value."""

    def __call__(self, episode: Episode) -> Any:
        """Return a number, a Reward or several, or None for none; an exception is a failure.

        A trajectory to which every function gave None is not compared with the others of its group.
        """


TRIAL_ANSWER = "I do not know."
"""What a reward function is called with before anything starts."""

RewardCallable = RewardFunction | Callable[[Episode], Any]


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A function with a weight, and perhaps another name."""

    function: Callable[[Episode], Any]
    weight: float = field(default=1.0, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", name_of(self.function))

    def __call__(self, episode: Episode) -> Any:
        """Return the function's result."""
        return self.function(episode)


class RewardRaised(InvalidConfig):
    """A reward function raised where it was tried out."""


@dataclass(frozen=True, slots=True)
class Rewards(Transform):
    """Call each function when the episode ends, or after every turn."""

    functions: Sequence[RewardCallable]
    every_turn: bool = field(default=False, kw_only=True)
    timeout_s: float = field(default=30.0, kw_only=True)

    def __post_init__(self) -> None:
        names = self.traits.reward_names
        if len(set(names)) != len(names):
            raise InvalidConfig(
                f"Two rewards have the same name: {', '.join(names)}.",
                remedy="Name them with NamedReward(function, name=...).",
            )

    @property
    def traits(self) -> Traits:
        """Return the rewards' names and their finest shape."""
        shape = RewardShape.TURN if self.every_turn else RewardShape.SPARSE
        if any(getattr(function, "per_token", False) for function in self.functions):
            shape = RewardShape.DENSE
        names = tuple(name_of(function) for function in self.functions)
        return Traits(reward_names=names, reward_shape=shape)

    def rehearse(self, tasks: TaskSource) -> None:
        """Raise InvalidConfig for a function that gives no finite number to an answer.

        What raises for want of something in a made-up episode is left to the real ones, and so are
        async functions, which may ask somebody.
        """
        try:
            split = tasks.splits[0]
            task = tasks.get(split, tasks.keys(split)[0])
        except Exception:
            return  # the checks of tasks name it
        asked = task.messages or History((Message(role="user", content=task.question),))
        for function in self.functions:
            if not is_async(function):
                with suppress(RewardRaised):
                    self.try_out(function, task, asked)

    def try_out(self, function: RewardCallable, task: TaskData, asked: History) -> None:
        """Call a function once, for a made-up answer to a task.

        Raise InvalidConfig for what is no finite number and no reward, or takes too long, and
        RewardRaised for what raises.
        """
        answer = Message(role="assistant", content=TRIAL_ANSWER)
        history = History((*asked, answer))
        episode = Episode(
            task=task, seed=0, history=history, step_index=1, answer=answer, terminated=True
        )
        use = getattr(function, "use", name_of(function))
        of = f"for task {task.key} and the answer {TRIAL_ANSWER!r}"
        try:
            value = call_now(function, episode, timeout_s=self.timeout_s)
        except TimeIsUp as error:
            raise InvalidConfig(
                f"The reward function '{use}' gives nothing {of}: {error}.",
                reason=Reason.REWARD_TIMEOUT,
                remedy="Let it return a number for every answer.",
            ) from error
        except Exception as error:
            raise RewardRaised(
                f"The reward function '{use}' fails {of}: {raised_at(error)}: {error}.",
                reason=Reason.REWARD_FAILED,
                remedy="Let it return a number for every answer.",
            ) from error
        try:
            shown = [each.value for each in _components(value, function) if not _is_finite(each)]
        except (TypeError, ValueError):
            shown = [value]
        if shown:
            raise InvalidConfig(
                f"The reward function '{use}' gives {shown[0]!r:.60} {of}.",
                reason=Reason.REWARD_NOT_FINITE,
                remedy="Let it return a finite number for every answer.",
            )

    async def score(self, episode: Episode) -> Score:
        """Return every function's reward; for one that fails, return a failure instead."""
        if not (episode.done or self.every_turn):
            return Score()
        rewards: list[Reward] = []
        failures: list[Failure] = []
        for function in self.functions:
            try:
                value = await call(function, episode, timeout_s=self.timeout_s)
                score = drop_non_finite(Score(rewards=tuple(_components(value, function))))
                rewards.extend(score.rewards)
                failures.extend(score.failures)
            except Exception as error:
                is_late = isinstance(error, TimeoutError)
                reason = Reason.REWARD_TIMEOUT if is_late else Reason.REWARD_FAILED
                what = f"Reward {name_of(function)}"
                failures.append(failure_of(error, owner=Owner.REWARD, reason=reason, what=what))
        return Score(rewards=tuple(rewards), failures=tuple(failures))


def _components(value: Any, function: RewardCallable) -> list[Reward]:
    if isinstance(value, tuple):
        return [part for item in value for part in _components(item, function)]
    if isinstance(value, Reward):
        return [value]
    name, weight = name_of(function), float(getattr(function, "weight", 1.0))
    if value is None:
        return [Reward(name=name, value=0.0, weight=weight, absent=True)]
    success = value if isinstance(value, bool) else None
    return [Reward(name=name, value=float(value), weight=weight, success=success)]


def drop_non_finite(score: Score) -> Score:
    """Return the score with a failure in place of each reward that is not finite."""
    wrong = [reward for reward in score.rewards if not _is_finite(reward)]
    if not wrong:
        return score
    failures = tuple(
        Failure(
            owner=Owner.REWARD,
            reason=Reason.REWARD_NOT_FINITE,
            message=f"Reward {reward.name} is {reward.value:g} * {reward.weight:g}, not a finite "
            "number.",
        )
        for reward in wrong
    )
    kept = tuple(reward for reward in score.rewards if reward not in wrong)
    return Score(rewards=kept, failures=score.failures + failures)


def _is_finite(reward: Reward) -> bool:
    return all(map(math.isfinite, (reward.value, reward.weight, *reward.per_token)))


def normalise(answer: str) -> str:
    """Return an answer in the form for comparisons: no `, $ %`, trailing dots or zeros.

    normalise(" $1,200.50. ")      # "1200.5"
    """
    text = re.sub(r"[,$%]", "", answer).strip().rstrip(".").strip()
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"[-+]?\d*\.\d+", text) else text


def truth_of(answer: str) -> str:
    """Return the truth in an answer of GSM8K's form: what follows the last `####`, or all of it."""
    return normalise(answer.rpartition("####")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """Reward 1 when the policy submitted `Result=N<submit>` with the task's answer, else 0."""

    name: str = "result"
    weight: float = 1.0
    submit: str = "<submit>"

    def __call__(self, episode: Episode) -> Reward:
        """Compare the last result before the submit with the truth."""
        truth = truth_of(episode.task.answer)
        if not truth:
            raise ValueError(f"task {episode.task.key} has no answer to compare with")
        right = episode.done_reason is DoneReason.SUBMITTED and self._result(episode) == truth
        return Reward(name=self.name, value=float(right), weight=self.weight, success=right)

    def _result(self, episode: Episode) -> str | None:
        submitted = episode.answer_text.partition(self.submit)[0]
        _, marker, result = submitted.rpartition("Result=")
        return normalise(result) if marker else None
