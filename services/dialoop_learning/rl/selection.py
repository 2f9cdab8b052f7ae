"""Select trajectories to imitate, as torchrl's TopKRewardSelector does.

    best_of([0.1, 0.4, 0.5, 0.9, 0.7], k=3)      # (3, 4): two are above the median 0.5
    window = TopKWindow(num_turns=64, k=8)       # of each task; the best of every 64 turns

`window.add(trajectory)` returns the best trajectories of a window that is full with it.
A reward must be strictly above the median. Among equal rewards there is no best trajectory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Group, Owner, Trajectory
from dialoop.user_functions import call_now

from dialoop_learning.rl.advantages import Aggregate, return_of


def best_of(rewards: Sequence[float], *, k: int) -> tuple[int, ...]:
    """Return the indices of at most k rewards above the median, best first; ties keep their order.

    Raises InvalidInput (TOP_K_TOO_LARGE) where k is not between 1 and the number of rewards.
    """
    if not 1 <= k <= len(rewards):
        raise InvalidInput(
            f"k is {k}, and the group has {len(rewards)} trajectories.",
            reason=Reason.TOP_K_TOO_LARGE,
            remedy="Set k to at least 1 and at most the size of a group.",
        )
    median = statistics.median(rewards)
    above = [index for index, reward in enumerate(rewards) if reward > median]
    return tuple(sorted(above, key=lambda index: (-rewards[index], index))[:k])


def with_best_alone(group: Group, *, k: int, aggregate: Aggregate = "sum") -> Group:
    """Return the group with advantage 1 on its best trajectories and 0 on the others.

    `aggregate` makes the sum, the largest or the mean of a trajectory's rewards its score. All
    trajectories stay in the group. Losses that imitate train only those with advantage 1.
    """
    turns = ([turn.reward for turn in t.turns] for t in group.trajectories)
    best = best_of([return_of(rewards, aggregate) for rewards in turns], k=k)
    trajectories = tuple(
        replace(
            trajectory,
            sequences=tuple(
                replace(s, advantage=1.0 if index in best else 0.0) for s in trajectory.sequences
            ),
        )
        for index, trajectory in enumerate(group.trajectories)
    )
    return replace(group, trajectories=trajectories)


def task_of(trajectory: Trajectory) -> Hashable:
    """Return what trajectories of one task have in common: their environment and task key."""
    return trajectory.environment, trajectory.task_key


class TopKWindow:
    """Choose the best trajectories of each window of turns, as they come from any groups.

    Each task has a window of its own, or whatever `key`, sync or async, returns. It is full with
    the trajectory that brings `num_turns` turns. Then its best trajectories are chosen and the next
    window begins empty, so that no trajectory is chosen twice.
    """

    def __init__(
        self,
        *,
        num_turns: int,
        k: int,
        aggregate: Aggregate = "sum",
        key: Callable[[Trajectory], Hashable] = task_of,
    ) -> None:
        if not 1 <= k <= num_turns:
            raise InvalidInput(
                f"k is {k}, and the window has {num_turns} turns.",
                reason=Reason.TOP_K_TOO_LARGE,
                remedy="Set k to at least 1 and at most num_turns.",
            )
        self._num_turns = num_turns
        self._k = k
        self._aggregate: Aggregate = aggregate
        self._key = key
        self._windows: dict[Hashable, list[Trajectory]] = {}

    def add(self, trajectory: Trajectory) -> tuple[Trajectory, ...]:
        """Return the best of the window that this trajectory fills, best first; else none.

        At most k are above the median of their rewards, each one number by `aggregate`. A
        trajectory without a turn, or cut short by something other than the policy, is left out.
        """
        if not trajectory.turns or any(f.owner is not Owner.POLICY for f in trajectory.failures):
            return ()
        key = call_now(self._key, trajectory)
        window = self._windows.setdefault(key, [])
        window.append(trajectory)
        if sum(len(member.turns) for member in window) < self._num_turns:
            return ()
        del self._windows[key]
        rewards = [
            return_of([turn.reward for turn in member.turns], self._aggregate) for member in window
        ]
        best = best_of(rewards, k=min(self._k, len(window)))
        return tuple(window[index] for index in best)
