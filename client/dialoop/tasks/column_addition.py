"""Two-digit sums in one turn: column by column before `#### N`, or guessed.

user       35+47
assistant  5+7=12 3+4+1=8 #### 82          reward 1; so is a right guess, `#### 82`

The last term of the second column is the carry. No tool helps: what is learned is to reason first.
`python -m dialoop_services.stack train infra/configs/reasoning.toml` trains it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from dialoop.chat import Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete
from dialoop.environments.episode import Episode, Outcome, Score, TaskData
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Reward

_ANSWER = re.compile(r"#### (\d+)\s*$")


def final_number(text: str) -> str | None:
    """What follows the `#### ` that ends a text; None where none does.

    final_number("5+7=12 3+4+1=8 #### 82")      # "82"
    """
    found = _ANSWER.search(text)
    return found[1] if found else None


def columns(a: int, b: int) -> str:
    """The reasoning, from the last column on: "5+7=12 3+4+1=8" of 35 and 47."""
    ones = a % 10 + b % 10
    carry = ones // 10
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry}"


@dataclass(frozen=True, slots=True)
class EndOnNumber(Transform):
    """A `#### N` at the end of the policy's message terminates the episode: CONTENT."""

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for it; a message without one is left to the step limit."""
        found = final_number(outcome.episode.answer_text)
        return outcome if found is None else outcome.terminate(DoneReason.CONTENT)


@dataclass(frozen=True, slots=True)
class FinalNumber(Transform):
    """Reward 1 when the episode ended with `#### N` and N is the task's answer, else 0."""

    name: str = "result"

    @property
    def traits(self) -> Traits:
        """The one component."""
        return Traits(reward_names=(self.name,))

    async def score(self, episode: Episode) -> Score:
        """Compare; a message that was cut off has no answer."""
        if not episode.done:
            return Score()
        given = final_number(episode.answer_text)
        right = episode.done_reason is DoneReason.CONTENT and given == episode.task.answer
        return Score(rewards=(Reward(name=self.name, value=float(right), success=right),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDemonstrations:
    """How a sum may be answered: guessed directly with this probability, else by its columns."""

    direct: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.direct <= 1:
            raise InvalidConfig(f"direct is {self.direct}.", remedy="Give a probability.")

    def __call__(self, task: TaskData, rng: random.Random) -> tuple[Message, ...]:
        """The one message after the prompt, which gets reward 1."""
        answer = f"#### {task.answer}"
        if rng.random() >= self.direct:
            a, b = map(int, task.question.split("+"))
            answer = f"{columns(a, b)} {answer}"
        return (Message(role="assistant", content=answer),)


def column_addition(*, num_heldout: int = 256, direct: float = 0.6) -> ChatEnv:
    """The environment; `direct` is the share of demonstrations that guess."""
    return ChatEnv(
        name="column_addition",
        description="Sums of two numbers, column by column or guessed, in one turn.",
        tasks=ArithmeticTasks(num_heldout=num_heldout),
        transforms=(EndWhenIncomplete(), EndOnNumber(), StepCounter(1), FinalNumber()),
        demonstrate=ColumnDemonstrations(direct=direct),
    )
