"""Hold the files that `dialoop env new` writes."""

TEMPLATE = '''"""The environment {name}: count the words of a sentence, with a tool.

dialoop env check {name}:environment      check all that an environment must do
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
    """Return questions with their answers. Yours may come from a file: see JsonlTasks."""
    chance = random.Random(seed)
    tasks = []
    for _ in range(count):
        words = chance.choices(WORDS, k=chance.randint(1, 9))
        tasks.append({"query": f"How many words: {' '.join(words)}?", "answer": str(len(words))})
    return tasks


def count_words(text: str) -> str:
    """Count words: the policy writes <request><count_words>red cat<call>, reads 2<response>."""
    if not text.strip():
        raise ToolInputError("there is no text.")  # the policy reads it; other errors are failures
    return str(len(text.split()))


def right(episode: Episode) -> float:
    """Return the reward: 1 when the policy submitted the task's answer, else 0."""
    submitted = episode.answer_text.partition("Result=")[2].partition("<submit>")[0]
    return float(submitted.strip() == episode.task.answer)


def demonstrate(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    """Return messages that solve a task, for supervised training before RL.

    Half of them answer without the tool: RL finds out what pays.
    """
    submit = Message(role="assistant", content=f"Result={task.answer}<submit>")
    if rng.random() < 0.5:
        return (submit,)
    words = task.question.partition(": ")[2].rstrip("?")
    return (
        Message(role="assistant", content=f"<request><count_words>{words}<call>"),
        Message(role="tool", content=f"{task.answer}<response>"),
        submit,
    )


def environment(num_train: int = 1000, num_heldout: int = 100) -> ChatEnv:
    """Make the environment that `use` names; [environment.options] are its arguments."""
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

JOB_TEMPLATE = """\
# The job that trains the environment {name}:
#   dialoop config check {name}.toml        what is wrong in it
#   dialoop train {name}.toml               runs it
#   dialoop console {name}                  shows it, while it runs and after
# `dialoop config print` tells every key. Without [model] the job makes a model of 0.8 million
# parameters, which the warm start teaches the environment's demonstrations.
run = "{name}"
engine = "transformers"  # or "vllm", where it is installed

[environment]
use = "{name}:environment"
name = "{name}"

[collector]
group_size = 8
max_new_tokens = 64

[warm_start]
num_steps = 150
batch_size = 32

[train]
num_steps = 16
groups_per_train_step = 8
learning_rate = 3e-4

[evaluation]
num_tasks = 64
"""
