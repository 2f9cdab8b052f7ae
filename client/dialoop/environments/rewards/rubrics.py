"""Rewards that combine other rewards, and judges.

    rubric = WeightedSum({"right": (ExactResult(), 1.0), "short": (brevity, 0.1)})
    rubric = Gate(has_answer, rubric)                 # 0 unless the gate returns 0.5 or more
    Rewards([NamedReward(rubric, name="rubric")])     # in an environment, as the episode runs

    best = GroupRelative(each_trajectory(brevity))    # in the scorer, on whole groups
    # [scorer] rewards = [{ name = "best", use = "mine:best", weight = 1.0 }]

Every part is a function of an Episode, sync or async. If a part raises, the whole rubric fails: a
reward that could not be computed is not 0.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dialoop.environments.episode import Episode, TaskData
from dialoop.environments.rewards.rescoring import episodes_of
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Group, Trajectory
from dialoop.user_functions import call

Part = Callable[[Episode], Any]
GroupFunction = Callable[["Group"], Any]


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of parts times their weights: {"name": (part, weight)}."""

    parts: Mapping[str, tuple[Part, float]]

    async def __call__(self, episode: Episode) -> float:
        """Compute all parts at the same time."""
        values = await _values([(part, episode) for part, _ in self.parts.values()])
        weights = [weight for _, weight in self.parts.values()]
        return sum(w * v for w, v in zip(weights, values, strict=True))


@dataclass(frozen=True, slots=True)
class Gate:
    """The reward if the gate reaches the threshold, else `closed` without computing it."""

    gate: Part
    reward: Part
    threshold: float = field(default=0.5, kw_only=True)
    closed: float = field(default=0.0, kw_only=True)

    async def __call__(self, episode: Episode) -> float:
        """Compute the gate first."""
        if await value_of(self.gate, episode) < self.threshold:
            return self.closed
        return await value_of(self.reward, episode)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Stages to be mastered in order: the first part below 1 decides.

    If the first k of n parts are 1, the reward is (k + value of the next) / n.
    """

    parts: Sequence[Part]

    async def __call__(self, episode: Episode) -> float:
        """Stop at the first part below 1."""
        for index, part in enumerate(self.parts):
            value = await value_of(part, episode)
            if value < 1.0:
                return (index + value) / len(self.parts)
        return 1.0


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """The share of the group's other trajectories that each one beats, with ties as a half.

    The rewards are from 0 to 1. It is for the scorer.
    """

    function: GroupFunction

    async def __call__(self, group: Group) -> list[float]:
        """Compare every trajectory with the others of its task."""
        values = [float(value) for value in await call(self.function, group)]
        if len(values) < 2:
            raise InvalidInput(
                f"The group has {len(values)} trajectories, too few to compare.",
                reason=Reason.GROUP_TOO_SMALL,
                remedy="Play at least two trajectories of each task.",
            )
        return [
            sum((v > o) + (v == o) / 2 for j, o in enumerate(values) if j != i) / (len(values) - 1)
            for i, v in enumerate(values)
        ]


def each_trajectory(part: Part) -> Callable[[Group], Awaitable[list[float]]]:
    """Make a reward of whole groups from a reward of one episode, for use in the scorer."""

    async def rewards(group: Group) -> list[float]:
        episodes = [last_episode(trajectory) for trajectory in group.trajectories]
        return await _values([(part, episode) for episode in episodes])

    return rewards


def last_episode(trajectory: Trajectory, task: TaskData | None = None) -> Episode:
    """Return the last episode of a stored trajectory, to score it again.

    Without `task` the episode has only the task's key, so pass it for rewards that need the answer.
    """
    task = task or TaskData(key=trajectory.task_key)
    episodes = episodes_of(trajectory, task, policy_role="assistant")
    if not episodes:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} has no turn.",
            reason=Reason.UNSCORABLE_TRAJECTORY,
            remedy="Record at least one turn.",
        )
    return episodes[-1]


async def value_of(part: Part, episode: Episode) -> float:
    """Return a part's number; raise if it is missing, or ValueError if it is not finite."""
    result = await call(part, episode)
    number: Any = getattr(result, "value", result)
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"a part of the rubric returned {value}")
    return value


async def _values(calls: Sequence[tuple[Part, Episode]]) -> list[float]:
    """Return the numbers of parts, computed at the same time; the first failure ends all."""
    try:
        async with asyncio.TaskGroup() as computing:
            tasks = [computing.create_task(value_of(part, episode)) for part, episode in calls]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in tasks]


_QUESTION = (
    "Rate how well the answer fulfils the task, from 0 (not at all) to {most} (fully). "
    "{criterion}\n"
    "\nTask:\n{question}\n\nReference answer (may be empty):\n{truth}\n\nAnswer:\n{answer}\n\n"
    "Reply with the number alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward from 0 to 1 by a chat model behind any OpenAI-compatible endpoint.

    It needs the `openai` package (extra `dialoop[judge]`). If the endpoint fails, or the reply has
    no number from 0 to `most`, the reward fails; it is never a 0.

    ask: what of the episode the judge reads, a text or chat messages; by default `question`, which
    has the task, its answer and the policy's last message. options: further fields of the request.

    at = "http://127.0.0.1:8000/v1"
    Judge(base_url=at, model="m", ask=lambda episode: f"Is this rude? {episode.answer_text}")
    """

    base_url: str
    model: str
    criterion: str = ""
    ask: Callable[[Episode], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    api_key: str = field(default="none", repr=False)
    most: int = 10
    timeout_s: float = 30.0
    num_retries: int = 2
    name: str = "judge"
    weight: float = 1.0

    async def __call__(self, episode: Episode) -> float:
        """Ask the model once; the client retries connection errors."""
        asked = await call(self.ask or self.question, episode)
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        async with self._client() as client:
            answer = await client.chat.completions.create(
                model=self.model, messages=messages, **self.options
            )
        return self.read(answer.choices[0].message.content or "")

    def question(self, episode: Episode) -> str:
        """Return the judge's prompt; the policy's text comes after instructions and truth."""
        return _QUESTION.format(
            most=self.most,
            criterion=self.criterion,
            question=episode.task.question,
            truth=episode.task.answer,
            answer=episode.answer_text,
        )

    def read(self, reply: str) -> float:
        """Return the share that a reply gives: "8", "8/10" and "4/5" are 0.8 where `most` is 10.

        ValueError if it is no number from 0 to `most`, or no share of what it names itself.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?))?\.?\s*", reply)
        most = float(self.most if match is None or match.group(2) is None else match.group(2))
        if match is None or not most or float(match.group(1)) > most:
            raise ValueError("the judge's reply is not a number in range")
        return float(match.group(1)) / most

    def _client(self) -> Any:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise InvalidConfig(
                "A judge needs the `openai` package.",
                reason=Reason.PACKAGE_MISSING,
                remedy='Run: pip install "dialoop[judge]"',
            ) from error
        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout=self.timeout_s,
            max_retries=self.num_retries,
        )
