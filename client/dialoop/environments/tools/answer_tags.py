"""Answers between tags: `<think>35+40 is 75</think><answer>75</answer>`.

tag_text("<answer> 75 </answer>", "answer")        # "75"
tag_text("<answer>75", "answer")                   # None: the block is not closed
tag_text("<answer></answer>", "answer")            # None: it holds nothing
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dialoop.environments.episode import Episode, Score
from dialoop.environments.rewards.functions import normalise, truth_of
from dialoop.environments.transform import Traits, Transform
from dialoop.trajectory import Reward
from dialoop.user_functions import call


def tag_text(text: str, tag: str) -> str | None:
    """Return the trimmed content of the first whole block of a tag; None without any."""
    name = re.escape(tag)
    match = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return match.group(1).strip() or None if match is not None else None


def same_number(answer: str, truth: str) -> bool:
    """Return whether two answers are equal without `, $ %`, blanks and trailing zeros."""
    return normalise(answer) == normalise(truth)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTagReward(Transform):
    """Reward the answer block: `right` when it equals the task's answer, `wrong`, or `absent`.

    It gives the reward `<name>` and, if `think` is above 0, `<name>_think` for a think block. Use
    it with EndOnTag, which ends the episode.
    """

    name: str = "answer"
    tag: str = "answer"
    right: float = 1.0
    wrong: float = 0.1
    absent: float = 0.0
    think: float = 0.0
    weight: float = 1.0
    # Whether the answer is the truth: a function, sync or async, that has `timeout_s` seconds.
    equal: Callable[[str, str], bool | Awaitable[bool]] = same_number
    timeout_s: float = 30.0

    @property
    def traits(self) -> Traits:
        """Return the names of the rewards."""
        names = (self.name, f"{self.name}_think") if self.think else (self.name,)
        return Traits(reward_names=names)

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over; raise ValueError when the task has no answer."""
        if not episode.done:
            return Score()
        truth = truth_of(episode.task.answer)
        if not truth:
            raise ValueError(f"task {episode.task.key} has no answer to compare with")
        content = tag_text(episode.answer_text, self.tag)
        is_right = content is not None and bool(
            await call(self.equal, content, truth, timeout_s=self.timeout_s)
        )
        value = self.absent if content is None else self.right if is_right else self.wrong
        rewards = [Reward(name=self.name, value=value, weight=self.weight, success=is_right)]
        if self.think:
            thought = tag_text(episode.answer_text, "think") is not None
            think_value = self.think if thought else 0.0
            rewards.append(Reward(name=f"{self.name}_think", value=think_value, weight=self.weight))
        return Score(rewards=tuple(rewards))
