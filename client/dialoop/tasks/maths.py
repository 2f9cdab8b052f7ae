r"""MATH and its like: answers that are formulas, compared by mathematics and not by spelling.

Rows are {"problem": "...", "solution": "... \\boxed{\\frac12}"} or have an `answer`. Equality is
math-verify's, in a process that is killed when it thinks too long: extra `dialoop[math]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete
from dialoop.environments.episode import Episode, Score
from dialoop.environments.stamps import StepCounter
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.sandbox.killable import KillableFunction
from dialoop.tasks.files import file_tasks
from dialoop.trajectory import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SYSTEM_PROMPT = "Solve the problem. Give the final answer in \\boxed{}."


def same_formula(given: str, wanted: str) -> bool:
    """Whether two texts hold the same mathematical answer; runs in a process of its own."""
    from math_verify import parse, verify

    # Its own timeouts need a main thread's signals; whoever calls this kills the process instead.
    truth = parse(wanted, parsing_timeout=None)
    answer = parse(given, parsing_timeout=None)
    return bool(verify(truth, answer, timeout_seconds=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward(Transform):
    """1 when the last answer is mathematically the task's, else 0; a check that hangs is killed."""

    name: str = "math"
    timeout_s: float = 10.0
    check: KillableFunction = field(
        default_factory=lambda: KillableFunction("dialoop.tasks.maths:same_formula")
    )

    @property
    def traits(self) -> Traits:
        """The component."""
        return Traits(reward_names=(self.name,))

    async def acquire(self) -> None:
        """Fail at the start, not at the first answer."""
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise InvalidConfig(
                "Comparing formulas needs the `math-verify` package.",
                reason=Reason.PACKAGE_MISSING,
                remedy='Run: pip install "dialoop[math]"',
            ) from error

    async def release(self) -> None:
        """End the processes."""
        await self.check.close()

    async def score(self, episode: Episode) -> Score:
        """Asked when the episode is over; a check that fails is a failure, never a 0."""
        if not episode.done:
            return Score()
        arguments = {"given": episode.answer_text, "wanted": episode.task.answer}
        right = bool(await self.check(arguments, timeout_s=self.timeout_s))
        return Score(rewards=(Reward(name=self.name, value=float(right), success=right),))


def maths(
    *,
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    system_prompt: str = SYSTEM_PROMPT,
    max_steps: int = 1,
    timeout_s: float = 10.0,
) -> ChatEnv:
    """The environment over rows with a problem and a solution or answer."""
    return ChatEnv(
        name="maths",
        description="Problems whose answers are formulas.",
        tasks=file_tasks(
            path,
            heldout_path=heldout_path,
            heldout_fraction=heldout_fraction,
            collate=_collate,
        ),
        transforms=(EndWhenIncomplete(), StepCounter(max_steps), MathReward(timeout_s=timeout_s)),
        system_prompt=system_prompt,
    )


def _collate(row: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {"problem": "query", "question": "query", "solution": "answer"}
    found = {names.get(name, name): value for name, value in row.items() if name != "answer"}
    return {**found, "answer": row["answer"]} if "answer" in row else found
