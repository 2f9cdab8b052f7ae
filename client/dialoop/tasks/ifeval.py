"""IFEval: follow instructions that can be checked by a program.

Rows are google/IFEval's: {"key": 1, "prompt": "", "instruction_id_list": [], "kwargs": []}.
The answer block is checked, strictly and loosely, in a process that is killed when a check hangs;
an aggregator makes one reward of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag, EndWhenIncomplete
from dialoop.environments.episode import Episode, Score
from dialoop.environments.stamps import StepCounter
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.sandbox.killable import KillableFunction
from dialoop.tasks.files import file_tasks
from dialoop.tasks.ifeval_checks import CHECKS
from dialoop.trajectory import Reward

if TYPE_CHECKING:
    from pathlib import Path

SYSTEM_PROMPT = "Think between <think> and </think>, then answer between <answer> and </answer>."

WEIGHTS = (0.4, 0.3, 0.2, 0.1)
"""Of prompt-level strict, instruction-level strict, prompt-level loose, instruction-level loose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What a response followed, per instruction, and how it was laid out."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    num_think_blocks: int = 1
    num_answer_blocks: int = 1
    is_complete: bool = True

    @property
    def weighted(self) -> float:
        """All instructions at once and their mean, strictly and loosely, by WEIGHTS: 0 to 1."""
        parts = (all(self.strict), fmean(self.strict), all(self.loose), fmean(self.loose))
        return sum(w * float(p) for w, p in zip(WEIGHTS, parts, strict=True))


Aggregator = Callable[[Followed], float]


def additive_v1(found: Followed) -> float:
    """Format + structure + 0.2 for a complete message: 0 to 2.2. The users' document has this."""
    structure = 0.5 * (found.num_think_blocks == 1) + 0.5 * (found.num_answer_blocks == 1)
    return found.weighted + structure + 0.2 * found.is_complete


def tiered_v2(found: Followed) -> float:
    """(format + quality) * structure * complexity; 0 without an answer block.

    quality: 0.3 above a format of 0.8, and 0.2 for a complete message. structure: 0.3 without a
    think block, 0.7 for several of either. complexity: a fifth more for each further instruction.
    """
    if not found.num_answer_blocks:
        return 0.0
    structure = {0: 0.3, 1: 1.0}.get(found.num_think_blocks, 0.7)
    structure *= 0.7 if found.num_answer_blocks > 1 else 1.0
    quality = 0.3 * (found.weighted > 0.8) + 0.2 * found.is_complete
    return (found.weighted + quality) * structure * (1 + 0.2 * (len(found.strict) - 1))


def weighted_v3(found: Followed) -> float:
    """Format, 0.1 for exactly one answer block, 0.05 for exactly one think block: 0 to 1.15."""
    bonus = 0.1 * (found.num_answer_blocks == 1) + 0.05 * (found.num_think_blocks == 1)
    return found.weighted + bonus


AGGREGATORS: Mapping[str, Aggregator] = MappingProxyType(
    {"additive_v1": additive_v1, "tiered_v2": tiered_v2, "weighted_v3": weighted_v3}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IfEvalReward(Transform):
    """One reward by the aggregator, and beside it (weight 0) the four scores it is made of."""

    aggregator: str = "weighted_v3"
    timeout_s: float = 10.0
    check: KillableFunction = field(
        default_factory=lambda: KillableFunction("dialoop.tasks.ifeval_checks:check_all")
    )

    def __post_init__(self) -> None:
        if self.aggregator not in AGGREGATORS:
            raise InvalidConfig(
                f"There is no aggregator {self.aggregator!r}.",
                remedy=f"Choose one of {', '.join(AGGREGATORS)}.",
            )

    @property
    def traits(self) -> Traits:
        """The components."""
        return Traits(reward_names=("ifeval", "strict", "loose"), needs_messages=True)

    async def release(self) -> None:
        """End the processes."""
        await self.check.close()

    async def score(self, episode: Episode) -> Score:
        """Asked when the episode is over; a check that fails is a failure, never a 0."""
        if not episode.done:
            return Score()
        text, data = episode.answer_text, episode.task.metadata
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        checked = await self.check(
            {
                "instructions": json.loads(data["instruction_id_list"]),
                "arguments": json.loads(data["kwargs"]),
                "prompt": episode.task.question,
                "response": answers[0] if answers else "",
            },
            timeout_s=self.timeout_s,
        )
        found = Followed(
            strict=tuple(checked["strict"]),
            loose=tuple(checked["loose"]),
            num_think_blocks=len(re.findall(r"<think>.*?</think>", text, re.DOTALL)),
            num_answer_blocks=len(answers),
            is_complete=episode.answer is not None and episode.answer.is_complete,
        )
        success = all(found.strict)
        value = AGGREGATORS[self.aggregator](found)
        told = {"strict": fmean(found.strict), "loose": fmean(found.loose)}
        return Score(
            rewards=(
                Reward(name="ifeval", value=value, success=success),
                *(Reward(name=n, value=v, weight=0.0, success=success) for n, v in told.items()),
            )
        )


def ifeval(
    *,
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    aggregator: str = "weighted_v3",
    system_prompt: str = SYSTEM_PROMPT,
    max_steps: int = 1,
) -> ChatEnv:
    """The environment over IFEval's rows from a file or a saved data set."""
    return ChatEnv(
        name="ifeval",
        description="Instructions that a program can check.",
        tasks=file_tasks(
            path,
            heldout_path=heldout_path,
            heldout_fraction=heldout_fraction,
            collate=_collate,
        ),
        transforms=(
            EndOnTag(),
            EndWhenIncomplete(),
            StepCounter(max_steps),
            IfEvalReward(aggregator=aggregator),
        ),
        system_prompt=system_prompt,
    )


def _collate(row: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = dict(row)
    query = fields.pop("prompt", None) or fields.pop("text", None) or fields.get("query")
    names, kwargs = fields.get("instruction_id_list"), fields.get("kwargs")
    known = isinstance(names, (list, tuple)) and all(name in CHECKS for name in names)
    if not known or not names or not isinstance(kwargs, (list, tuple)) or len(kwargs) != len(names):
        raise InvalidConfig(
            f"An IFEval row names instructions {names!r}, not each with its arguments.",
            reason=Reason.BAD_ROW,
            remedy="Give instruction_id_list (known ids) and kwargs (one mapping for each).",
        )
    given = [{k: v for k, v in dict(one or {}).items() if v is not None} for one in kwargs]
    return {**fields, "query": query, "instruction_id_list": list(names), "kwargs": given}
