"""Rewards made of rewards, and judges.

    rubric = WeightedSum({"right": (ExactResult(), 1.0), "short": (brevity, 0.1)})
    rubric = Gate(has_answer, rubric)                 # 0 unless the gate says 0.5 or more
    Rewards([NamedReward(rubric, name="rubric")])     # in an environment, as the episode runs

    best = GroupRelative(each_trajectory(brevity))    # in the scorer, on whole groups
    # [scorer] rewards = [{ name = "best", use = "mine:best", weight = 1.0 }]

Every part is a function of an Episode, sync or async; a part that raises fails the whole, since a
reward that could not be computed is no 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.environments.episode import Episode, TaskData
from dialoop.environments.rewards.rescoring import episodes_of
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from dialoop.trajectory import Group, Trajectory

Part = Callable[[Episode], Any]
GroupFunction = Callable[["Group"], Any]


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of parts times their weights: {"name": (part, weight)}."""

    parts: Mapping[str, tuple[Part, float]]

    async def __call__(self, episode: Episode) -> float:
        """All parts at the same time."""
        values = await asyncio.gather(*(value_of(part, episode) for part, _ in self.parts.values()))
        weights = [weight for _, weight in self.parts.values()]
        return sum(w * v for w, v in zip(weights, values, strict=True))


@dataclass(frozen=True, slots=True)
class Gate:
    """The reward where the gate reaches the threshold, else `closed`; then it is not computed."""

    gate: Part
    reward: Part
    threshold: float = field(default=0.5, kw_only=True)
    closed: float = field(default=0.0, kw_only=True)

    async def __call__(self, episode: Episode) -> float:
        """Ask the gate first."""
        if await value_of(self.gate, episode) < self.threshold:
            return self.closed
        return await value_of(self.reward, episode)


@dataclass(frozen=True, slots=True)
class InOrder:
    """The first part that is not full decides: stages that must be mastered one after the other.

    With n parts, of which the first k are 1: (k + value of the next) / n.
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
    """What share of the group's others each trajectory beats, ties half: 0 to 1, for the scorer."""

    function: GroupFunction

    async def __call__(self, group: Group) -> list[float]:
        """Compare every trajectory with the others of its task."""
        found = self.function(group)
        values = [float(v) for v in (await found if inspect.isawaitable(found) else found)]
        if len(values) < 2:
            raise InvalidInput(
                "A group of one has nobody to compare with.",
                reason=Reason.GROUP_TOO_SMALL,
                remedy="Play at least two trajectories of each task.",
            )
        return [
            sum((v > o) + (v == o) / 2 for j, o in enumerate(values) if j != i) / (len(values) - 1)
            for i, v in enumerate(values)
        ]


def each_trajectory(part: Part) -> Callable[[Group], Awaitable[list[float]]]:
    """A reward for whole groups from a reward of one episode: the same file serves both hosts."""

    async def rewards(group: Group) -> list[float]:
        episodes = [last_episode(trajectory) for trajectory in group.trajectories]
        return list(await asyncio.gather(*(value_of(part, episode) for episode in episodes)))

    return rewards


def last_episode(trajectory: Trajectory, task: TaskData | None = None) -> Episode:
    """The episode a stored trajectory ends with: what a reward reads when it scores it again.

    Without the task only its key is known; a reward that needs the answer must be given it.
    """
    known = task or TaskData(key=trajectory.task_key)
    episodes = episodes_of(trajectory, known, policy_role="assistant")
    if not episodes:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} has no turn.",
            reason=Reason.UNSCORABLE_TRAJECTORY,
            remedy="Record at least one turn.",
        )
    return episodes[-1]


async def value_of(part: Part, episode: Episode) -> float:
    """A part's number; ValueError for one that is not finite or missing."""
    found = part(episode)
    found = await found if inspect.isawaitable(found) else found
    number: Any = getattr(found, "value", found)
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"a part of the rubric gave {value}")
    return value


_QUESTION = (
    "Rate how well the answer fulfils the task, from 0 (not at all) to {most} (fully). "
    "{criterion}\n"
    "\nTask:\n{question}\n\nReference answer (may be empty):\n{truth}\n\nAnswer:\n{answer}\n\n"
    "Reply with the number alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward from 0 to 1 by a chat model behind any OpenAI-compatible endpoint.

    Needs the `openai` package (extra `dialoop[judge]`). An endpoint that fails, or a reply without
    a number between 0 and `most`, is an error and so a failed reward, never a 0.
    """

    base_url: str
    model: str
    criterion: str = ""
    api_key: str = field(default="none", repr=False)
    most: int = 10
    timeout_s: float = 30.0
    num_retries: int = 2
    name: str = "judge"
    weight: float = 1.0

    async def __call__(self, episode: Episode) -> float:
        """Ask once; connection errors are retried."""
        async with self._client() as client:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": self.question(episode)}],
                temperature=0.0,
            )
        return self.read(answer.choices[0].message.content or "")

    def question(self, episode: Episode) -> str:
        """What the judge reads. The policy's text stands last, and cannot ask for a grade."""
        return _QUESTION.format(
            most=self.most,
            criterion=self.criterion,
            question=episode.task.question,
            truth=episode.task.answer,
            answer=episode.answer_text,
        )

    def read(self, reply: str) -> float:
        """The number in a reply, over `most`; ValueError where there is none in range."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*\d+)?\.?\s*", reply)
        if found is None or float(found.group(1)) > self.most:
            raise ValueError("the judge's reply is no number in range")
        return float(found.group(1)) / self.most

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
