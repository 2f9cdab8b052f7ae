r"""MATH and similar data: answers that are formulas, compared by their value and not their text.

Rows are {"problem": "...", "solution": "... \\boxed{\\frac12}"} or have an `answer`. math-verify
compares (extra `dialoop[math]`), in a process that is killed when it takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.files import QUESTIONS, file_tasks, text_of
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.sandbox.killable import KillableFunction
from dialoop.trajectory import Reward

SYSTEM_PROMPT = "Solve the problem. Give the final answer in \\boxed{}."


def same_formula(answer_text: str, wanted: str) -> bool:
    """Return whether two texts have the same mathematical answer; runs in its own process."""
    from math_verify import parse, verify

    # math-verify's timeouts need signals of the main thread; the caller kills the process instead.
    truth = parse(wanted, parsing_timeout=None)
    answer = parse(answer_text, parsing_timeout=None)
    return bool(verify(truth, answer, timeout_seconds=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward(Transform):
    """Reward 1 when the last answer equals the task's mathematically, else 0."""

    name: str = "math"
    timeout_s: float = 10.0
    check: KillableFunction = field(
        default_factory=lambda: KillableFunction("dialoop.tasks.maths:same_formula")
    )

    @property
    def traits(self) -> Traits:
        """Return the reward's name."""
        return Traits(reward_names=(self.name,))

    async def acquire(self) -> None:
        """Check for math-verify, so that a service without it does not start."""
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise InvalidConfig(
                "Comparing formulas needs the `math-verify` package.",
                reason=Reason.PACKAGE_MISSING,
                remedy='Run: pip install "dialoop[math]"',
            ) from error

    async def release(self) -> None:
        """End the processes of the checks."""
        await self.check.close()

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over; raise when the check fails or times out."""
        if not episode.done:
            return Score()
        arguments = {"answer_text": episode.answer_text, "wanted": episode.task.answer}
        right = bool(await self.check(arguments, timeout_s=self.timeout_s))
        return Score(rewards=(Reward(name=self.name, value=float(right), success=right),))


def maths(  # noqa: PLR0913 - the options are the interface
    *,
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    system_prompt: str = SYSTEM_PROMPT,
    max_steps: int = 1,
    timeout_s: float = 10.0,
    ignore_columns: Sequence[str] = (),
) -> ChatEnv:
    """Return the environment of rows with a problem and a solution or answer.

    Columns that MATH does not have are refused, unless they are among ignore_columns.
    """
    return ChatEnv(
        name="maths",
        description="Problems whose answers are formulas.",
        tasks=file_tasks(
            path,
            heldout_path=heldout_path,
            heldout_fraction=heldout_fraction,
            collate=_collate,
            questions=(*QUESTIONS, "problem"),
            known_columns=("solution", "answer", "key", "level", "type", "subject", "unique_id"),
            ignore_columns=ignore_columns,
        ),
        transforms=(
            EndWhenIncomplete(),
            OneTurn() if max_steps == 1 else StepCounter(max_steps),
            MathReward(timeout_s=timeout_s),
        ),
        system_prompt=system_prompt,
        redo="safe",
    )


def _collate(row: Mapping[str, Any]) -> Mapping[str, Any]:
    questions = ("problem", *QUESTIONS)
    rest = {k: v for k, v in row.items() if k not in (*questions, "solution", "answer")}
    has_answer = row.get("answer") is not None
    answer = text_of(row, "answer" if has_answer else "solution")
    return {**rest, "query": text_of(row, *questions), "answer": answer}
