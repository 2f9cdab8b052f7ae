"""Rewards on whole groups: a user's reward functions, and the KL penalty.

def brevity(group: Group) -> list[float]:
    return [-float(trajectory.num_model_tokens) for trajectory in group.trajectories]

def solved(group: Group) -> list[Reward]:
    return [Reward(name="", value=v, success=v > 0.5) for v in graded(group)]
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.failures import log_failure
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.trajectory import Group, Reward, Trajectory
from dialoop.user_functions import TimeIsUp, call, call_now, loop_of_users, raised_at
from dialoop_learning.rl.turn_tokens import TurnTokens

if TYPE_CHECKING:
    from dialoop.sequences import Floats

    from dialoop_services.config.scorer_tables import RewardSpec

ONCE_S = 10.0
"""Seconds that a function may take where it is called once before a job."""

RewardFunction = Callable[[Group], Any]
"""Returns one value per trajectory of the group, in order; may be async. If it raises, the group
is dropped. Calls for different groups run at the same time: async ones on one event loop, each sync
one in a thread of its own.

A value is a number, a bool (which is also the success), a Reward, or None where the reward does not
apply. Of a Reward the value, success and values per token are kept; its weight is multiplied with
the setting's, whose name it gets. A Reward with values per token has one for each token that the
policy sampled in the trajectory, turn by turn. They become a reward of each turn.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """A named reward function and its weight."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """A reward of -coefficient * KL; estimators as in http://joschu.net/blog/kl-approx.html."""

    coefficient: float
    estimator: str = "k1"


def load_rewards(specs: Sequence[RewardSpec]) -> tuple[GroupReward, ...]:
    """Import the functions; raise InvalidConfig (REWARD_NOT_FOUND) for one that is missing."""
    return tuple(
        GroupReward(
            name=spec.name,
            function=load_function(
                spec.use, what="reward function", reason=Reason.REWARD_NOT_FOUND
            ),
            weight=spec.weight,
            timeout_s=spec.timeout_s,
        )
        for spec in specs
    )


def load_function(path: str, *, what: str, reason: Reason) -> Callable[..., Any]:
    """Import a function of a group, or of its rewards; InvalidConfig where there is none."""
    function: Callable[..., Any] = load_attribute(path, what=what, reason=reason)
    if not callable(function):
        raise InvalidConfig(
            f"The {what} '{path}' is not a function.",
            reason=reason,
            remedy="Name a function, as module:function.",
        )
    return function


async def with_reward(group: Group, reward: GroupReward) -> Group:
    """Return the group with one more reward on each trajectory's last turn.

    Raise PreconditionFailed (REWARD_FAILED) when the function fails, because a missing reward is
    not a reward of 0.
    """
    try:
        values = await call_apart(reward.function, group, timeout_s=reward.timeout_s)
        values = list(values) if isinstance(values, Iterable) else values  # a generator may raise
    except TimeIsUp as error:
        raise _reward_failed(reward.name, str(error).removeprefix("it ")) from error
    except Exception as error:
        error_id = log_failure(error, f"Reward {reward.name}")
        raise _reward_failed(
            reward.name, f"raised {raised_at(error)} (error_id {error_id})"
        ) from error
    rewards = _rewards_in(values, reward, group)
    pairs = zip(group.trajectories, rewards, strict=True)
    return replace(group, trajectories=tuple(_with(t, own) for t, own in pairs))


def rehearse(reward: GroupReward) -> None:
    """Raise InvalidConfig (REWARD_FAILED) unless a group of four gets four finite rewards.

    What raises for want of something in a made-up group is left to the real ones.
    """
    group = group_of_four()
    try:
        values = call_now(reward.function, group, timeout_s=ONCE_S)
    except Exception:
        return
    try:
        _rewards_in(values, reward, group)
    except PreconditionFailed as error:
        raise InvalidConfig(
            error.message, reason=error.reason, remedy="Correct that function."
        ) from error


def group_of_four() -> Group:
    """Return a made-up group, with which functions of a user are called once before a job."""
    from dialoop.testing import group

    return group(0.0, 1.0, 0.0, 1.0)


def _rewards_in(values: Any, reward: GroupReward, group: Group) -> list[Reward]:
    """Return what the function returned as rewards; PreconditionFailed for anything else."""
    try:
        rewards = [_reward_of(value, reward) for value in values]
    except Exception as error:
        raise _reward_failed(
            reward.name, f"returned a {type(values).__name__}, which is no list of numbers"
        ) from error
    if len(rewards) != group.num_trajectories:
        raise _reward_failed(
            reward.name, f"gave {len(rewards)} values for {group.num_trajectories}"
        )
    if not all(map(_is_finite, rewards)):
        raise _reward_failed(reward.name, "gave a value that is not finite")
    for trajectory, own in zip(group.trajectories, rewards, strict=True):
        if own.per_token and len(own.per_token) != trajectory.num_model_tokens:
            raise _reward_failed(
                reward.name,
                f"gave {len(own.per_token)} values per token for the "
                f"{trajectory.num_model_tokens} sampled tokens of {trajectory.trajectory_id}",
            )
    return rewards


async def call_apart(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Return what a user's function returns; raise TimeoutError after `timeout_s`.

    It runs on an event loop of all such functions, so that one that blocks stops no lease or probe.
    """
    calling = call(function, *arguments, timeout_s=timeout_s)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, loop_of_users()))


def with_kl_penalty(group: Group, penalty: KlPenalty) -> Group:
    """Return the group with the dense reward "kl": minus the KL of each sampled token."""
    trajectories = []
    for trajectory in group.trajectories:
        kl = [
            token_kl(s.inference_logprobs, s.ref_logprobs, penalty.estimator)
            for s in trajectory.sequences
        ]
        values = (-np.concatenate(TurnTokens.of(trajectory).gather(kl))).tolist()
        trajectories.append(
            _with(trajectory, Reward.dense("kl", values, weight=penalty.coefficient))
        )
    return replace(group, trajectories=tuple(trajectories))


def token_kl(policy: Floats, reference: Floats, estimator: str = "k1") -> Floats:
    """Return estimates of KL(policy, reference) per sampled token, float32 [M], from log-probs.

    token_kl(np.float32([-1.0]), np.float32([-1.5]))     # [0.5]: k1; k2 is 0.125, k3 is 0.1065

    Raise InvalidInput (RAGGED) where the two differ in length.
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


def _reward_of(value: Any, setting: GroupReward) -> Reward:
    if isinstance(value, Reward):
        return replace(value, name=setting.name, weight=setting.weight * value.weight)
    if value is None:
        return Reward(name=setting.name, value=0.0, weight=setting.weight, absent=True)
    success = bool(value) if isinstance(value, (bool, np.bool_)) else None
    return Reward(name=setting.name, value=float(value), weight=setting.weight, success=success)


def _is_finite(reward: Reward) -> bool:
    return all(map(math.isfinite, (reward.value, reward.weight, *reward.per_token)))


def _with(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Return the trajectory with the reward on its last turn, or its tokens' part on each turn."""
    if not trajectory.turns:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} has no turn to reward.",
            reason=Reason.UNSCORABLE_TRAJECTORY,
            remedy="Record at least one turn.",
        )
    rewards: list[tuple[Reward, ...]] = [() for _ in trajectory.turns]
    rewards[-1] = (reward,)
    if reward.per_token:
        start = 0
        for number, count in enumerate(TurnTokens.of(trajectory).counts):
            part = reward.per_token[start : start + count]
            start += count
            if part:
                rewards[number] = (Reward.dense(reward.name, part, weight=reward.weight),)
        rewards[-1] = tuple(
            replace(own, success=reward.success, feedback=reward.feedback) for own in rewards[-1]
        )
    pairs = zip(trajectory.turns, rewards, strict=True)
    turns = tuple(replace(turn, rewards=(*turn.rewards, *own)) for turn, own in pairs)
    return replace(trajectory, turns=turns)


def _reward_failed(name: str, how: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"The reward {name} {how}.",
        reason=Reason.REWARD_FAILED,
        remedy="Fix the reward function; the group is dropped, not scored 0.",
    )
