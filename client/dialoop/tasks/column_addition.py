"""Two-digit sums in one turn: answered as `#### N`, after the columns or directly.

user       35+47
assistant  5+7=12 3+4+1=8 #### 82          reward 1; so is a right guess, `#### 82`

The last term of the second column is the carry. There is no tool; the policy learns to reason.
`python -m dialoop_ops.stack train infra/configs/reasoning.toml` trains it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from dialoop.chat import Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score, TaskData
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Reward

_ANSWER = re.compile(r"#### (\d+)\s*$")


def final_number(text: str) -> str | None:
    """Return the number after the `#### ` at the end of a text; None if there is none.

    final_number("5+7=12 3+4+1=8 #### 82")      # "82"
    """
    match = _ANSWER.search(text)
    return match[1] if match else None


def columns(a: int, b: int) -> str:
    """Return the reasoning from the last column on: "5+7=12 3+4+1=8" for 35 and 47."""
    ones = a % 10 + b % 10
    carry = ones // 10
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry}"


@dataclass(frozen=True, slots=True)
class FinalNumber(Transform):
    """Reward 1 when the episode ended with `#### N` and N is the task's answer, else 0."""

    name: str = "result"

    @property
    def traits(self) -> Traits:
        """Return the reward's name."""
        return Traits(reward_names=(self.name,))

    async def score(self, episode: Episode) -> Score:
        """Compare the numbers; a message that was cut off has no answer."""
        if not episode.done:
            return Score()
        number = final_number(episode.answer_text)
        right = episode.done_reason is DoneReason.CONTENT and number == episode.task.answer
        return Score(rewards=(Reward(name=self.name, value=float(right), success=right),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDemonstrations:
    """Answers to a sum: with probability `direct` without the columns, else with them."""

    direct: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.direct <= 1:
            raise InvalidConfig(
                f"direct is {self.direct}.", remedy="Use a probability from 0 to 1."
            )

    def __call__(self, task: TaskData, rng: random.Random) -> tuple[Message, ...]:
        """Return the message after the prompt; it gets reward 1."""
        answer = f"#### {task.answer}"
        if rng.random() >= self.direct:
            a, b = map(int, task.question.split("+"))
            answer = f"{columns(a, b)} {answer}"
        return (Message(role="assistant", content=answer),)


def column_addition(*, num_heldout: int = 256, direct: float = 0.6) -> ChatEnv:
    """Return the environment; `direct` is the share of demonstrations without the columns."""
    return ChatEnv(
        name="column_addition",
        description="Sums of two numbers, column by column or guessed, in one turn.",
        tasks=ArithmeticTasks(num_heldout=num_heldout),
        transforms=(EndWhenIncomplete(), OneTurn(), FinalNumber()),
        demonstrate=ColumnDemonstrations(direct=direct),
        redo="safe",
    )
