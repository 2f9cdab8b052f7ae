"""Answers between tags: `<think>35+40 is 75</think><answer>75</answer>`.

tag_text("<answer> 75 </answer>", "answer")        # "75"
tag_text("<answer>75", "answer")                   # None: a block that is not closed is none
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dialoop.environments.episode import Episode, Score
from dialoop.environments.rewards.functions import normalised, truth_of
from dialoop.environments.transform import Traits, Transform
from dialoop.trajectory import Reward


def tag_text(text: str, tag: str) -> str | None:
    """What stands in the first whole block of a tag, trimmed; None when there is none."""
    name = re.escape(tag)
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return None if found is None else found.group(1).strip()


def same_number(answer: str, truth: str) -> bool:
    """Whether two answers are equal once `, $ %`, blanks and trailing zeros are gone."""
    return normalised(answer) == normalised(truth)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTagReward(Transform):
    """Reward the answer block: `right` when it equals the task's answer, `wrong`, or `absent`.

    Gives the components `<name>` and, where `think` is above 0, `<name>_think` for a think block.
    Goes with EndOnTag, which decides when the episode is over.
    """

    name: str = "answer"
    tag: str = "answer"
    right: float = 1.0
    wrong: float = 0.1
    absent: float = 0.0
    think: float = 0.0
    weight: float = 1.0
    equal: Callable[[str, str], bool] = same_number

    @property
    def traits(self) -> Traits:
        """The components."""
        names = (self.name, f"{self.name}_think") if self.think else (self.name,)
        return Traits(reward_names=names)

    async def score(self, episode: Episode) -> Score:
        """Asked when the episode is over; a task without an answer is a failure, never a 0."""
        if not episode.done:
            return Score()
        truth = truth_of(episode.task.answer)
        if not truth:
            raise ValueError(f"task {episode.task.key} has no answer to compare with")
        found = tag_text(episode.answer_text, self.tag)
        is_right = found is not None and self.equal(found, truth)
        value = self.absent if found is None else self.right if is_right else self.wrong
        rewards = [Reward(name=self.name, value=value, weight=self.weight, success=is_right)]
        if self.think:
            thought = tag_text(episode.answer_text, "think") is not None
            given = self.think if thought else 0.0
            rewards.append(Reward(name=f"{self.name}_think", value=given, weight=self.weight))
        return Score(rewards=tuple(rewards))
