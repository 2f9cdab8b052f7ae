"""IFEval: instructions that a program can check.

Rows are google/IFEval's: {"key": 1, "prompt": "", "instruction_id_list": [], "kwargs": []}.
A process checks the answer block, strictly and loosely; it is killed when a check hangs. An
aggregator makes one reward from the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag, EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.files import QUESTIONS, file_tasks, text_of, wrong_value
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.sandbox.killable import KillableFunction
from dialoop.tasks.ifeval_checks import CHECKS, IN_A_LANGUAGE, require_langdetect
from dialoop.tasks.ifeval_words import words_of
from dialoop.trajectory import Reward
from dialoop.user_functions import call

SYSTEM_PROMPT = "Think between <think> and </think>, then answer between <answer> and </answer>."

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
"""Weights of prompt-level strict, instruction-level strict, and both of them loose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Which instructions a response followed, and its layout.

    is_about_topic: it has ten words or more beside a wanted end, and names the row's topic.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    num_think_blocks: int = 1
    num_answer_blocks: int = 1
    is_complete: bool = True
    is_about_topic: bool = True

    @property
    def weighted(self) -> float:
        """Return the sum by WEIGHTS of all at once and the mean, strict and loose: 0 to 1."""
        parts = (all(self.strict), fmean(self.strict), all(self.loose), fmean(self.loose))
        return sum(w * float(p) for w, p in zip(WEIGHTS, parts, strict=True))


Aggregator = Callable[[Followed], float]


def additive_v1(followed: Followed) -> float:
    """Return format + structure + 0.2 for a complete message: 0 to 2.2."""
    structure = 0.5 * (followed.num_think_blocks == 1) + 0.5 * (followed.num_answer_blocks == 1)
    return followed.weighted + structure + 0.2 * followed.is_complete


def tiered_v2(followed: Followed) -> float:
    """Return (format + quality) * structure * complexity; 0 without an answer block.

    quality: 0.3 if format is above 0.8, plus 0.2 for a complete message. structure: 0.3 without a
    think block, 0.7 with several, and times 0.7 with several answer blocks. complexity: a fifth
    more for each further instruction.
    """
    if not followed.num_answer_blocks:
        return 0.0
    structure = {0: 0.3, 1: 1.0}.get(followed.num_think_blocks, 0.7)
    structure *= 0.7 if followed.num_answer_blocks > 1 else 1.0
    quality = 0.3 * (followed.weighted > 0.8) + 0.2 * followed.is_complete
    return (followed.weighted + quality) * structure * (1 + 0.2 * (len(followed.strict) - 1))


def weighted_v3(followed: Followed) -> float:
    """Return format + 0.1 for one answer block + 0.05 for one think block: 0 to 1.15."""
    bonus = 0.1 * (followed.num_answer_blocks == 1) + 0.05 * (followed.num_think_blocks == 1)
    return followed.weighted + bonus


def about_topic(followed: Followed) -> float:
    """Return the share that was followed strictly: 0 to 1; a fifth of it beside the topic.

    Without the fifth a policy learns to say a wanted phrase and nothing else.
    """
    return fmean(followed.strict) * (1.0 if followed.is_about_topic else 0.2)


AGGREGATORS: Mapping[str, Aggregator] = MappingProxyType(
    {
        "additive_v1": additive_v1,
        "tiered_v2": tiered_v2,
        "weighted_v3": weighted_v3,
        "about_topic": about_topic,
    }
)
MIN_WORDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class IfEvalReward(Transform):
    """One reward by the aggregator, and the mean strict and loose scores with weight 0.

    The reward's feedback names the instructions that were not followed strictly, and the topic that
    the answer is beside.
    aggregator: one of AGGREGATORS, or a function of Followed, sync or async, that returns a number.
    in_blocks: the answer stands between <answer> and </answer>; else it is the whole message.
    """

    aggregator: str | Aggregator = "weighted_v3"
    in_blocks: bool = True
    timeout_s: float = 10.0
    check: KillableFunction = field(
        default_factory=lambda: KillableFunction("dialoop.tasks.ifeval_checks:check_all")
    )

    def __post_init__(self) -> None:
        if not callable(self.aggregator) and self.aggregator not in AGGREGATORS:
            raise InvalidConfig(
                f"There is no aggregator {self.aggregator!r}.",
                remedy=f"Choose one of {', '.join(AGGREGATORS)}, or give a function of Followed.",
            )

    @property
    def traits(self) -> Traits:
        """Return the rewards' names."""
        return Traits(reward_names=("ifeval", "strict", "loose"), needs_messages=True)

    async def release(self) -> None:
        """End the processes of the checks."""
        await self.check.close()

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over; raise when the check fails or times out."""
        if not episode.done:
            return Score()
        text, data = episode.answer_text, episode.task.metadata
        blocks = _blocks(text, "answer")
        answers = blocks if self.in_blocks else [text]
        instructions, arguments = (
            json.loads(data["instruction_id_list"]),
            json.loads(data["kwargs"]),
        )
        results = await self.check(
            {
                "instructions": instructions,
                "arguments": arguments,
                "prompt": episode.task.question,
                "response": answers[0] if answers else "",
            },
            timeout_s=self.timeout_s,
        )
        followed = Followed(
            strict=tuple(results["strict"]),
            loose=tuple(results["loose"]),
            num_think_blocks=len(_blocks(text, "think")),
            num_answer_blocks=len(answers),
            is_complete=episode.answer is not None and episode.answer.is_complete,
            is_about_topic=_is_about_topic(answers[0] if answers else "", data),
        )
        success = all(followed.strict)
        own = self.aggregator
        if callable(own):
            value = float(await call(own, followed, timeout_s=self.timeout_s))
        else:
            value = AGGREGATORS[own](followed)
        means = {"strict": fmean(followed.strict), "loose": fmean(followed.loose)}
        failed = zip(instructions, arguments, followed.strict, strict=True)
        words = [words_of(name, given) for name, given, is_followed in failed if not is_followed]
        if not followed.is_about_topic:
            words.append(f"Write at least {MIN_WORDS} words about {data['topic']}.")
        return Score(
            rewards=(
                Reward(name="ifeval", value=value, success=success, feedback="\n".join(words)),
                *(Reward(name=n, value=v, weight=0.0, success=success) for n, v in means.items()),
            )
        )


def _blocks(text: str, tag: str) -> list[str]:
    """Return the content of each whole block of a tag that holds something."""
    return [
        block for block in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) if block.strip()
    ]


def _is_about_topic(answer: str, row: Mapping[str, str]) -> bool:
    """Return whether an answer has enough words and names its topic, where the row has one."""
    if "topic" not in row:
        return True
    for arguments in json.loads(row["kwargs"]):
        answer = answer.replace(arguments.get("end_phrase") or "\0", "")
    noun = row["topic"].split()[-1].lower()
    names_it = re.search(rf"\b{re.escape(noun.rstrip('s'))}", answer.lower()) is not None
    return names_it and len(answer.split()) >= MIN_WORDS


def ifeval(  # noqa: PLR0913 - the options are the interface
    *,
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    aggregator: str | Aggregator = "weighted_v3",
    system_prompt: str | None = None,
    max_steps: int = 1,
    in_blocks: bool = True,
    ignore_columns: Sequence[str] = (),
) -> ChatEnv:
    """Return the environment of IFEval's rows from a file or a saved data set.

    Columns that IFEval does not have are refused, unless they are among ignore_columns.

    in_blocks: ask for a think and an answer block; False asks for the plain answer that IFEval
    itself judges, without a system prompt unless one is given.
    """
    if system_prompt is None:
        system_prompt = SYSTEM_PROMPT if in_blocks else ""
    return ChatEnv(
        name="ifeval",
        description="Instructions that a program can check.",
        tasks=file_tasks(
            path,
            heldout_path=heldout_path,
            heldout_fraction=heldout_fraction,
            collate=collate_ifeval,
            questions=(*QUESTIONS, "prompt"),
            known_columns=("instruction_id_list", "kwargs", "key", "topic"),
            ignore_columns=ignore_columns,
        ),
        transforms=(
            *((EndOnTag(),) if in_blocks else ()),
            EndWhenIncomplete(),
            OneTurn() if max_steps == 1 else StepCounter(max_steps),
            IfEvalReward(aggregator=aggregator, in_blocks=in_blocks),
        ),
        system_prompt=system_prompt,
        redo="safe",
    )


def collate_ifeval(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's query and its instructions.

    Raise InvalidInput (BAD_ROW) for unknown ones, or InvalidConfig (PACKAGE_MISSING) where a check
    needs langdetect.
    """
    questions = ("prompt", *QUESTIONS)
    fields = {name: value for name, value in row.items() if name not in questions}
    names, kwargs = fields.get("instruction_id_list"), fields.get("kwargs")
    if not (
        isinstance(names, (list, tuple))
        and names
        and all(isinstance(name, str) and name in CHECKS for name in names)
    ):
        raise wrong_value("instruction_id_list", names, "a list of known instructions")
    if not (
        isinstance(kwargs, (list, tuple))
        and len(kwargs) == len(names)
        and all(isinstance(arguments, (Mapping, type(None))) for arguments in kwargs)
    ):
        raise wrong_value("kwargs", kwargs, "a list with one object for each instruction")
    if IN_A_LANGUAGE.intersection(names):
        require_langdetect()
    arguments = [
        {k: v for k, v in dict(mapping or {}).items() if v is not None} for mapping in kwargs
    ]
    own = {"instruction_id_list": list(names), "kwargs": arguments}
    return {**fields, "query": text_of(row, *questions), **own}
