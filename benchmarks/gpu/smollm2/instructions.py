"""Short texts that follow instructions which a program can check, for a small chat model.

An answer earns the share of its instructions that it follows, and a fifth of that where it does not
speak of its topic in six words or more: else "That is all." would be the best answer of all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from dialoop.environments import (
    ChatEnv,
    EndWhenIncomplete,
    Episode,
    NamedReward,
    OneTurn,
    Rewards,
    RowTasks,
)
from dialoop.tasks.ifeval_checks import follows

_TOPICS = Path(__file__).with_name("topics.txt").read_text("utf-8").splitlines()
_NUM_HELDOUT = 16
"""Topics, the last ones, that no training task has."""
_ASKS = (
    "Write a short text about {}.",
    "Tell me something about {}.",
    "Describe {} in a few words.",
    "What comes to your mind when you think of {}?",
)
_END = "That is all."
_INSTRUCTIONS = {
    "change_case:english_lowercase": "Use only lowercase letters, no capital letters at all.",
    "punctuation:no_comma": "Do not use any commas.",
    "startend:end_checker": f"End your answer with exactly: {_END}",
    "startend:quotation": "Put your whole answer in double quotation marks.",
    "detectable_format:title": "Begin with a title in double angular brackets, such as <<title>>.",
}
_APART = ({"change_case:english_lowercase", "startend:end_checker"},)
"""Instructions that contradict each other."""


def rows(topics: list[str], count: int, seed: int) -> list[dict[str, str]]:
    """Return questions with one or two instructions each."""
    rng = random.Random(seed)
    made: list[dict[str, str]] = []
    while len(made) < count:
        names = rng.sample(sorted(_INSTRUCTIONS), rng.choice((1, 1, 2)))
        if set(names) not in _APART:
            topic = rng.choice(topics)
            parts = [rng.choice(_ASKS).format(topic), *(_INSTRUCTIONS[name] for name in names)]
            query = " ".join(parts)
            made.append({"query": query, "topic": topic, "instructions": json.dumps(names)})
    return made


def instruction_share(episode: Episode) -> float:
    """Return the reward of an answer."""
    answer, task = episode.answer_text, episode.task
    names = json.loads(task.metadata["instructions"])
    checks = (
        follows(name, {"end_phrase": _END}, prompt=task.question, response=answer) for name in names
    )
    share = sum(checks) / len(names)
    text = answer.replace(_END, "").lower()
    topic = task.metadata["topic"].split()[-1].rstrip("s").lower()
    return share if topic in text and len(text.split()) >= 6 else share / 5


environment = ChatEnv(
    name="instructions",
    description="Short texts under instructions that a program can check.",
    tasks=RowTasks(
        {
            "train": rows(_TOPICS[:-_NUM_HELDOUT], 600, seed=7),
            "heldout": rows(_TOPICS[-_NUM_HELDOUT:], 96, seed=8),
        }
    ),
    transforms=(EndWhenIncomplete(), OneTurn(), Rewards([NamedReward(instruction_share)])),
)
