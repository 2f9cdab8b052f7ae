"""Rewards on whole groups: those a user adds, and the price of leaving the reference.

def brevity(group: Group) -> list[float]:
    return [-float(trajectory.num_model_tokens) for trajectory in group.trajectories]

def solved(group: Group) -> list[Reward]:
    return [Reward(name="", value=v, success=v > 0.5) for v in graded(group)]
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.environments.tools.calling import call
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.trajectory import Group, Reward, Trajectory

if TYPE_CHECKING:
    from dialoop.sequences import Floats

    from dialoop_services.config.tables import RewardSpec

log = logging.getLogger(__name__)

RewardFunction = Callable[[Group], Any]
"""One value per trajectory of the group, in order, sync or async; an exception drops the group.

A value is a number, a bool, which is also its success, or a Reward: its value, success and numbers
per token count, its weight times the setting's, under the setting's name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """A named reward function and how much it counts."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """Reward -coefficient * KL; `estimator` as in http://joschu.net/blog/kl-approx.html."""

    coefficient: float
    estimator: str = "k1"


def load_rewards(specs: Sequence[RewardSpec]) -> tuple[GroupReward, ...]:
    """Import the functions; InvalidConfig (REWARD_NOT_FOUND) names the one that is not there."""
    return tuple(
        GroupReward(
            name=spec.name,
            function=_function_at(spec.use),
            weight=spec.weight,
            timeout_s=spec.timeout_s,
        )
        for spec in specs
    )


def _function_at(use: str) -> RewardFunction:
    found = load_attribute(use, what="reward function", reason=Reason.REWARD_NOT_FOUND)
    if not callable(found):
        raise InvalidConfig(f"'{use}' is not a function.", reason=Reason.REWARD_NOT_FOUND)
    function: RewardFunction = found
    return function


def with_reward(group: Group, reward: GroupReward) -> Group:
    """The group with one more reward on each trajectory's last turn.

    Raises PreconditionFailed (REWARD_FAILED) when the function fails: no reward is not reward 0.
    """
    try:
        # Scoring has a thread of its own, so an async reward may have a loop of its own here.
        found = asyncio.run(call(reward.function, group, timeout_s=reward.timeout_s))
        rewards = [_reward_of(value, reward) for value in found]
    except TimeoutError as error:
        raise _failed(reward.name, f"took more than {reward.timeout_s:g} s") from error
    except Exception as error:
        log.exception("Reward %s failed.", reward.name, extra={"group_id": group.group_id})
        raise _failed(reward.name, f"raised {type(error).__name__}") from error
    if len(rewards) != group.num_trajectories:
        raise _failed(reward.name, f"gave {len(rewards)} values for {group.num_trajectories}")
    if not all(map(_is_finite, rewards)):
        raise _failed(reward.name, "gave a value that is not finite")
    return _rewarded(group, rewards)


def with_kl_penalty(group: Group, penalty: KlPenalty) -> Group:
    """The group with the reward "kl", minus the sum of the tokens' KL, on the last turns."""
    values = [-_kl_of(trajectory, penalty.estimator) for trajectory in group.trajectories]
    weight = penalty.coefficient
    return _rewarded(group, [Reward(name="kl", value=value, weight=weight) for value in values])


def token_kl(policy: Floats, reference: Floats, estimator: str = "k1") -> Floats:
    """Per-token estimates of KL(policy, reference) from sampled tokens' log-probs, [M].

    token_kl([-1.0], [-1.5])  # k1: 0.5, k2: 0.125, k3: 0.1065

    Raises InvalidInput (RAGGED) where the two are not of the same tokens.
    """
    if policy.shape != reference.shape:
        raise InvalidInput(
            f"The policy has {policy.size} log-probs, the reference {reference.size}.",
            reason=Reason.RAGGED,
            remedy="Give one of each for every sampled token.",
        )
    difference = policy - reference
    if estimator == "k1":
        values = difference
    elif estimator == "k2":
        values = difference**2 / 2
    else:
        # expm1 keeps the digits of the usual case, where the two log-probs nearly agree.
        values = np.expm1(-difference) + difference
    return np.asarray(values, dtype=np.float32)


def _kl_of(trajectory: Trajectory, estimator: str) -> float:
    return sum(
        float(token_kl(s.inference_logprobs, s.ref_logprobs, estimator).sum())
        for s in trajectory.sequences
    )


def _reward_of(value: Any, asked: GroupReward) -> Reward:
    if isinstance(value, Reward):
        return replace(value, name=asked.name, weight=asked.weight * value.weight)
    success = bool(value) if isinstance(value, (bool, np.bool_)) else None
    return Reward(name=asked.name, value=float(value), weight=asked.weight, success=success)


def _is_finite(reward: Reward) -> bool:
    return all(map(math.isfinite, (reward.value, reward.weight, *reward.per_token)))


def _rewarded(group: Group, rewards: Sequence[Reward]) -> Group:
    pairs = zip(group.trajectories, rewards, strict=True)
    return replace(group, trajectories=tuple(_with(t, reward) for t, reward in pairs))


def _with(trajectory: Trajectory, reward: Reward) -> Trajectory:
    if not trajectory.turns:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} has no turn to reward.",
            reason=Reason.UNSCORABLE_TRAJECTORY,
            remedy="Record at least one turn.",
        )
    last = trajectory.turns[-1]
    turn = replace(last, rewards=(*last.rewards, reward))
    return replace(trajectory, turns=(*trajectory.turns[:-1], turn))


def _failed(name: str, how: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"The reward {name} {how}.",
        reason=Reason.REWARD_FAILED,
        remedy="Mend the reward function; the group is dropped, not scored 0.",
    )
