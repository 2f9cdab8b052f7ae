r"""GSM8K: word problems with one numeric answer, with reasoning in <think> and it in <answer>.

Rows are {"question": "...", "answer": "... #### 72"}. An episode has one turn. The reward is 1.0
for the right answer, 0.1 for a wrong one and 0.0 for none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag, EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score
from dialoop.environments.rewards.functions import normalise
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.files import QUESTIONS, Row, file_tasks, text_of
from dialoop.environments.tasks.row_tasks import text_to_query
from dialoop.environments.tools.answer_tags import tag_text
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Reward

SYSTEM_PROMPT = (
    "Solve the problem. Think between <think> and </think>, then give the number alone between "
    "<answer> and </answer>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kReward(Transform):
    """The parts of GSM8K's reward. Their weighted sum is 1.0, 0.1 or 0.0.

    reward_answer: there is an answer block. reward_think: there is a think block (weight 0 by
    default: recorded but not counted). reward_right: the answer equals the truth.
    reward_contained: the answer contains the truth (weight 0 by default).
    """

    answer: float = 0.1
    right: float = 0.9
    think: float = 0.0
    contained: float = 0.0

    @property
    def traits(self) -> Traits:
        """Return the rewards' names."""
        names = ("reward_answer", "reward_think", "reward_right", "reward_contained")
        return Traits(reward_names=names)

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over."""
        if not episode.done:
            return Score()
        truth = gsm8k_truth(episode.task.answer)
        answer = tag_text(episode.answer_text, "answer")
        right = answer is not None and normalise(answer) == truth
        contained = answer is not None and truth in re.findall(r"-?[\d.]+", normalise(answer))
        thought = tag_text(episode.answer_text, "think") is not None

        def component(name: str, holds: bool, weight: float) -> Reward:
            return Reward(name=name, value=float(holds), weight=weight, success=right)

        return Score(
            rewards=(
                component("reward_answer", answer is not None, self.answer),
                component("reward_think", thought, self.think),
                component("reward_right", right, self.right),
                component("reward_contained", contained, self.contained),
            )
        )


def gsm8k_truth(answer: str) -> str:
    """Return what follows the only `#### `; InvalidInput (BAD_ANSWER) unless there is one."""
    _, *after = answer.split("#### ")
    if len(after) != 1:
        raise InvalidInput(
            f"The answer has '#### ' {len(after)} times, not once.",
            reason=Reason.BAD_ANSWER,
            remedy="Give answers in GSM8K's form: the reasoning, then '#### 72'.",
        )
    return normalise(after[0])


def gsm8k(  # noqa: PLR0913 - the options are the interface
    *,
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    system_prompt: str = SYSTEM_PROMPT,
    max_steps: int = 1,
    think: float = 0.0,
    contained: float = 0.0,
    ignore_columns: Sequence[str] = (),
) -> ChatEnv:
    """Return the environment of GSM8K's rows from a JSONL or Parquet file, or a saved data set.

    Columns that GSM8K does not have are refused, unless they are among ignore_columns.
    """
    tasks = file_tasks(
        path,
        heldout_path=heldout_path,
        heldout_fraction=heldout_fraction,
        collate=_collate,
        known_columns=("answer", "key"),
        ignore_columns=ignore_columns,
    )
    return ChatEnv(
        name="gsm8k",
        description="Grade-school word problems with one numeric answer.",
        tasks=tasks,
        transforms=(
            EndOnTag(),
            EndWhenIncomplete(),
            OneTurn() if max_steps == 1 else StepCounter(max_steps),
            Gsm8kReward(think=think, contained=contained),
        ),
        system_prompt=system_prompt,
        redo="safe",
    )


def _collate(row: Row) -> Row:
    gsm8k_truth(text_of(row, "answer"))
    return {**text_to_query(row), "query": text_of(row, "question", *QUESTIONS)}
