"""Episodes that take long without computing: chains of sums with a slow calculator, and counting.

user       35+40+21
assistant  <request><Calculator>35+40<call>
tool       75<response>                          after a lognormal time
assistant  <request><Calculator>75+21<call>
tool       96<response>
assistant  Result=96<submit>                     reward 1

The calculator takes one sum at a time, so an episode has three to six turns. Its times have the
median .33 s and the 99th percentile 10 s, times `scale`.

user       4
assistant  1 2 3 4<submit>                       reward 1

The lengths of counting have a long tail too, and the engine works for every token of it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable

from dialoop.chat import Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.episode import Episode, TaskData
from dialoop.environments.rewards.functions import ExactResult
from dialoop.environments.standard import tool_environment
from dialoop.environments.tasks.source import ListedTasks
from dialoop.environments.tools.calculator import Calculator
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.trajectory import DoneReason

MEDIAN_S, P99_S = 0.33, 10.0
_SIGMA = (
    math.log(P99_S / MEDIAN_S) / 2.326
)  # of the logarithm: the standard normal's 99 % are there
LONGEST_S = 120.0
NUM_TRAINING, NUM_HELDOUT = 4000, 256
_ONE_SUM = re.compile(r"\s*\d+\+\d+\s*", re.ASCII)


def _keys(make: Callable[[random.Random], str]) -> dict[str, list[str]]:
    """Return different keys for training and for the held-out tasks."""
    generator, keys = random.Random(0), dict[str, None]()
    while len(keys) < NUM_TRAINING + NUM_HELDOUT:
        keys[make(generator)] = None
    ordered = list(keys)
    return {"heldout": ordered[:NUM_HELDOUT], "train": ordered[NUM_HELDOUT:]}


class ChainTasks(ListedTasks):
    """Sums of three to six numbers of two digits, as "35+40+21"."""

    def __init__(self) -> None:
        super().__init__(_keys(_chain))

    def task(self, split: str, key: str) -> TaskData:
        """Return the sum with its result."""
        return TaskData(key=key, question=key, answer=Calculator()(key))


def _chain(generator: random.Random) -> str:
    return "+".join(str(generator.randint(10, 99)) for _ in range(generator.randint(3, 6)))


def _solve_chain(task: TaskData, generator: random.Random) -> tuple[Message, ...]:
    """Return a solution; every second one guesses the last sum, which is right by chance alone."""
    total, *numbers = task.question.split("+")
    messages: list[Message] = []
    guesses = generator.random() < 0.5
    for place, number in enumerate(numbers):
        if guesses and place == len(numbers) - 1:
            break
        call = f"<request><Calculator>{total}+{number}<call>"
        total = str(int(total) + int(number))
        messages.append(Message(role="assistant", content=call))
        messages.append(Message(role="tool", content=f"{total}<response>"))
    said = task.answer if not guesses else str(int(task.answer) + generator.randint(-9, 9))
    return (*messages, Message(role="assistant", content=f"Result={said}<submit>"))


def chains(scale: float = 1.0) -> ChatEnv:
    """Return the environment of chains; `scale` is a factor of the calculator's times."""
    calculate, times = Calculator(), random.Random()

    async def calculator(expression: str) -> str:
        if not _ONE_SUM.fullmatch(expression):
            raise ToolInputError("one sum of two numbers at a time.")
        seconds = scale * MEDIAN_S * math.exp(_SIGMA * times.gauss(0, 1))
        await asyncio.sleep(min(LONGEST_S, seconds))
        return calculate(expression)

    return tool_environment(
        name="chains",
        description="Chains of sums with a slow calculator.",
        tasks=ChainTasks(),
        tools={"Calculator": calculator},
        rewards=[ExactResult()],
        max_turns=7,
        tool_timeout_s=2 * LONGEST_S,
        demonstrate=_solve_chain,
    )


class CountTasks(ListedTasks):
    """Numbers to count up to: half of them at most 12, one in a hundred above 70."""

    def __init__(self) -> None:
        super().__init__(_keys(_count))

    def task(self, split: str, key: str) -> TaskData:
        """Return the number; what follows the dot only tells two tasks apart."""
        number = key.partition(".")[0]
        return TaskData(key=key, question=number, answer=number)


def _count(generator: random.Random) -> str:
    number = min(99, max(1, round(12 * math.exp(0.76 * generator.gauss(0, 1)))))
    return f"{number}.{generator.randrange(10**6)}"


def _solve_count(task: TaskData, generator: random.Random) -> tuple[Message, ...]:
    """Return a solution; every second one stops somewhere before the end."""
    last = int(task.answer)
    if generator.random() < 0.5:
        last = generator.randint(1, last)
    text = " ".join(map(str, range(1, last + 1)))
    return (Message(role="assistant", content=f"{text}<submit>"),)


def counted(episode: Episode) -> float:
    """Return the share of the way that was counted rightly; 1 for all of it and a submit."""
    last = int(episode.task.answer)
    said = episode.answer_text.partition("<submit>")[0].split(" ")
    right = next((n for n, word in enumerate(said) if word != str(n + 1)), len(said))
    is_whole = episode.done_reason is DoneReason.SUBMITTED and len(said) == right == last
    return 1.0 if is_whole else 0.5 * min(right, last) / last


def counting() -> ChatEnv:
    """Return the environment of counting."""
    return tool_environment(
        name="counting",
        description="Counting up to a number.",
        tasks=CountTasks(),
        tools=[],
        rewards=[counted],
        max_turns=1,
        demonstrate=_solve_count,
    )
