"""Instructions that a program can check, about topics: rows in IFEval's format, made here.

    env = instructions()          # 2,000 tasks to train on, 96 about topics that no other has
    instruction_rows(3, seed=1)

A prompt asks for an answer about a topic and gives one or two of eight instructions. An answer that
follows them all but has fewer than ten words, or does not speak of its topic, earns a fifth.
"""

from __future__ import annotations

import random
from typing import Any, Final

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete, OneTurn
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.tasks.ifeval import IfEvalReward, collate_ifeval

Instruction = tuple[str, dict[str, Any], str]

TOPICS: Final = tuple(
    """the sea|a rainy day|coffee|trains|my grandmother|the moon|learning to swim|a lost key
    |bicycles|winter|bread|a city at night|dogs|an old library|gardening|the desert|a birthday party
    |chess
    |rivers|the first day of school|cats|mountains|honey bees|a long journey|music|autumn leaves
    |a broken clock|football|stars|tea|painting|a small island|robots|the postman|windmills|sailing
    |cooking soup|a quiet forest|paper boats|friendship|lighthouses|thunderstorms|apples|museums
    |running|a lazy Sunday|kites|snow|markets|bridges|whales|hats|candles|maps|rain boots|poetry
    |ladders|owls|pirates|volcanoes|ants|castles|ferries|sunflowers|harbours|pancakes|penguins|caves
    |violins|lemons|glaciers|balloons|goats|canals|dragons|blankets|beaches|rockets|tigers|meadows
    |clouds|chairs|spoons|parrots|walnuts|fog|ice cream|tunnels|roses|wolves|salt|mirrors|deer|ink
    |carpets|the opera|tomatoes|elephants|a campfire|gloves""".replace("\n    ", "").split("|")
)
NUM_HELDOUT_TOPICS: Final = 20
ASKS: Final = (
    "Write two sentences about {}.",
    "Tell me something about {}.",
    "Describe {} in one or two sentences.",
    "What comes to your mind when you think of {}?",
)
INSTRUCTIONS: Final[tuple[Instruction, ...]] = (
    (
        "change_case:english_lowercase",
        {},
        "Use only lowercase letters and no capital letters at all.",
    ),
    ("punctuation:no_comma", {}, "Do not use any commas."),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        "End your answer with exactly this phrase: That is all.",
    ),
    ("startend:quotation", {}, "Put your whole answer in double quotation marks."),
    (
        "detectable_format:title",
        {},
        "Begin with a title in double angular brackets, such as <<title>>.",
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
        "Highlight one part of it with asterisks, such as *this part*.",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Add a postscript at the end that starts with P.S.",
    ),
    (
        "keywords:existence",
        {"keywords": ["always", "remember"]},
        "Use the words always and remember.",
    ),
)
_NO_PAIRS: Final = frozenset(
    frozenset(pair)
    for pair in (
        ("change_case:english_lowercase", "startend:end_checker"),
        ("change_case:english_lowercase", "detectable_content:postscript"),
        ("startend:end_checker", "detectable_content:postscript"),
        ("startend:quotation", "detectable_content:postscript"),
        ("startend:quotation", "detectable_format:title"),
    )
)
"""Instructions that contradict each other, or that only a riddle brings together."""


def instruction_rows(num: int, *, seed: int = 0, heldout: bool = False) -> list[dict[str, Any]]:
    """Return rows of IFEval's columns with a `topic`, the same for the same seed.

    Every second row has two instructions. heldout: about topics that the others are not about.
    """
    pick = random.Random(f"instructions {seed} {heldout}")
    topics = TOPICS[-NUM_HELDOUT_TOPICS:] if heldout else TOPICS[:-NUM_HELDOUT_TOPICS]
    rows = []
    for number in range(num):
        topic, chosen = pick.choice(topics), _choose(pick, 1 + number % 2)
        asked = pick.choice(ASKS).format(topic)
        rows.append(
            {
                "prompt": " ".join((asked, *(words for _, _, words in chosen))),
                "instruction_id_list": [name for name, _, _ in chosen],
                "kwargs": [arguments for _, arguments, _ in chosen],
                "topic": topic,
            }
        )
    return rows


def _choose(pick: random.Random, num: int) -> list[Instruction]:
    while True:
        chosen = pick.sample(INSTRUCTIONS, num)
        if frozenset(name for name, _, _ in chosen) not in _NO_PAIRS:
            return chosen


def instructions(*, num_train: int = 2000, num_heldout: int = 96, seed: int = 0) -> ChatEnv:
    """Return the environment of made instructions; the model answers in one turn."""
    rows = {
        "train": instruction_rows(num_train, seed=seed),
        "heldout": instruction_rows(num_heldout, seed=seed, heldout=True),
    }
    return ChatEnv(
        name="instructions",
        description="Instructions that a program can check, about a topic.",
        tasks=RowTasks(rows, collate=collate_ifeval),
        transforms=(
            EndWhenIncomplete(),
            OneTurn(),
            IfEvalReward(aggregator="about_topic", in_blocks=False),
        ),
        redo="safe",
    )
