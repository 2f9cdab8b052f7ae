"""The file that `dialoop env new` writes."""

TEMPLATE = '''"""The environment {name}: count the words of a sentence, with a tool.

dialoop env check {name}:environment      what an environment must do, and whether this one does
dialoop env play {name}:environment       play it by hand; --inference host:port: by a policy

[environment]                             in a job config
use = "{name}:environment"
name = "{name}"
"""

from __future__ import annotations

import random

from dialoop.chat import Message
from dialoop.environments import ChatEnv, Episode, RowTasks, TaskData, ToolInputError
from dialoop.environments import tool_environment

WORDS = ("red", "green", "blue", "old", "new", "cat", "dog", "bird")


def rows(seed: int, count: int) -> list[dict[str, str]]:
    """Questions with their answers. Yours may come from a file: see JsonlTasks."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        words = chance.choices(WORDS, k=chance.randint(1, 9))
        found.append({"query": f"How many words: {' '.join(words)}?", "answer": str(len(words))})
    return found


def count_words(text: str) -> str:
    """A tool: the policy asks <request><count_words>red cat<call> and reads 2<response>."""
    if not text.strip():
        raise ToolInputError("there is no text.")  # told to the policy; others are failures
    return str(len(text.split()))


def right(episode: Episode) -> float:
    """A reward: what the policy submitted, compared with the task's answer."""
    submitted = episode.answer_text.partition("Result=")[2].partition("<submit>")[0]
    return float(submitted.strip() == episode.task.answer)


def demonstrate(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    """How a task is solved: what supervised training before any reward reads."""
    words = task.question.partition(": ")[2].rstrip("?")
    return (
        Message(role="assistant", content=f"<request><count_words>{words}<call>"),
        Message(role="tool", content=f"{task.answer}<response>"),
        Message(role="assistant", content=f"Result={task.answer}<submit>"),
    )


def environment(num_train: int = 1000, num_heldout: int = 100) -> ChatEnv:
    """What `use` names; its arguments are [environment.options] of a job config."""
    return tool_environment(
        name="{name}",
        description="Count the words of a sentence.",
        tasks=RowTasks({"train": rows(1, num_train), "heldout": rows(2, num_heldout)}),
        tools=[count_words],
        rewards=[right],
        max_turns=3,
        demonstrate=demonstrate,
    )
'''
