"""Reward functions, and the transform that asks them.

def brevity(episode: Episode) -> float:
    return 1 / (1 + len(episode.answer_text))

Rewards([ExactResult(), NamedReward(brevity, weight=0.1)])
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dialoop.environments.episode import Episode, Score
from dialoop.environments.failures import failure_of
from dialoop.environments.modes import RewardShape
from dialoop.environments.tools.calling import call, name_of
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward


class RewardFunction(Protocol):
    """A named reward; a plain function is one too, with its own name and weight 1. May be async."""

    @property
    def name(self) -> str:
        """The name of the component."""
        ...

    @property
    def weight(self) -> float:
        """What its value is multiplied with."""
        ...

    def __call__(self, episode: Episode) -> Any:
        """A number, a Reward, or None for no reward; an exception is a failure, never 0."""
        ...


RewardCallable = RewardFunction | Callable[[Episode], Any]


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A function with a weight, and another name if need be."""

    function: Callable[[Episode], Any]
    weight: float = field(default=1.0, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", name_of(self.function))

    def __call__(self, episode: Episode) -> Any:
        """What the function gives."""
        return self.function(episode)


@dataclass(frozen=True, slots=True)
class Rewards(Transform):
    """Ask each function when the episode ends, or after every turn."""

    functions: Sequence[RewardCallable]
    every_turn: bool = field(default=False, kw_only=True)
    timeout_s: float = field(default=30.0, kw_only=True)

    def __post_init__(self) -> None:
        names = self.traits.reward_names
        if len(set(names)) != len(names):
            raise InvalidConfig(
                f"Two rewards have one name: {', '.join(names)}.",
                remedy="Name them with NamedReward(function, name=...).",
            )

    @property
    def traits(self) -> Traits:
        """The names of the components, and how fine they are."""
        shape = RewardShape.TURN if self.every_turn else RewardShape.SPARSE
        if any(getattr(function, "per_token", False) for function in self.functions):
            shape = RewardShape.DENSE
        names = tuple(name_of(function) for function in self.functions)
        return Traits(reward_names=names, reward_shape=shape)

    async def score(self, episode: Episode) -> Score:
        """Every function's reward; one that fails leaves its reward out and says so."""
        if not (episode.done or self.every_turn):
            return Score()
        rewards, failures = [], []
        for function in self.functions:
            try:
                value = await call(function, episode, timeout_s=self.timeout_s)
                rewards.extend(_components(value, function))
            except Exception as error:
                reason = (
                    Reason.REWARD_TIMEOUT
                    if isinstance(error, TimeoutError)
                    else Reason.REWARD_FAILED
                )
                what = f"Reward {name_of(function)}"
                failures.append(failure_of(error, owner=Owner.REWARD, reason=reason, what=what))
        return Score(rewards=tuple(rewards), failures=tuple(failures))


def _components(value: Any, function: RewardCallable) -> list[Reward]:
    if value is None:
        return []
    if not isinstance(value, Reward):
        success = value if isinstance(value, bool) else None
        weight = float(getattr(function, "weight", 1.0))
        value = Reward(name=name_of(function), value=float(value), weight=weight, success=success)
    if not math.isfinite(value.value * value.weight):
        raise ValueError(f"reward {value.name} is {value.value} * {value.weight}")
    return [value]


def finite(score: Score) -> Score:
    """The score without rewards that are not finite; each of those is a failure, never a 0."""
    wrong = [reward for reward in score.rewards if not _is_finite(reward)]
    if not wrong:
        return score
    failures = tuple(
        Failure(
            owner=Owner.REWARD,
            reason=Reason.REWARD_NOT_FINITE,
            message=f"Reward {reward.name} is not a finite number.",
        )
        for reward in wrong
    )
    kept = tuple(reward for reward in score.rewards if reward not in wrong)
    return Score(rewards=kept, failures=score.failures + failures)


def _is_finite(reward: Reward) -> bool:
    return math.isfinite(reward.value * reward.weight) and all(map(math.isfinite, reward.per_token))


def normalised(answer: str) -> str:
    """An answer as it is compared: no `, $ %`, no trailing dot, no zeros behind the point.

    normalised(" $1,200.50. ")      # "1200.5"
    """
    text = re.sub(r"[,$%]", "", answer).strip().removesuffix(".").strip()
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"[-+]?\d*\.\d+", text) else text


def truth_of(answer: str) -> str:
    """The truth in an answer of GSM8K's form: what follows the last `####`, else all of it."""
    return normalised(answer.rpartition("####")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """1 when the policy submitted `Result=N<submit>` with the task's answer, else 0."""

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
        _, found, result = submitted.rpartition("Result=")
        return normalised(result) if found else None
