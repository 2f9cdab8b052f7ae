"""Two-digit sums as tasks, and demonstrations of their solutions.

user       35+40
assistant  <request><Calculator>35+40<call>
tool       75<response>
assistant  Result=75<submit>                    reward 1
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dialoop.chat import Message
from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import ListedTasks, share_of
from dialoop.environments.tools.calculator import Calculator
from dialoop.errors import InvalidConfig


class ArithmeticTasks(ListedTasks):
    """All problems `a+b` (and `a-b` with a >= b) of a range, except a tenth, for training.

    "heldout" has the `num_heldout` problems of that tenth with the lowest hash; no split has the
    others. The two numbers without their order decide, so if "heldout" has 35+40, then "train" does
    not have 40+35.
    """

    def __init__(
        self,
        *,
        operations: str = "+",
        low: int = 10,
        high: int = 99,
        num_heldout: int = 256,
        heldout_share: float = 0.1,
    ) -> None:
        if not operations or set(operations) - set("+-") or not 0 <= low <= high:
            raise InvalidConfig(
                f"There are no problems with operations '{operations}' on {low}..{high}.",
                remedy="Use operations '+', '-' or '+-' and 0 <= low <= high.",
            )
        problems = {
            f"{a}{operation}{b}": share_of(f"{min(a, b)}{operation}{max(a, b)}")
            for operation in operations
            for a in range(low, high + 1)
            for b in range(low, high + 1)
            if operation == "+" or a >= b
        }
        kept = sorted((s, key) for key, s in problems.items() if s < heldout_share)
        if len(kept) < num_heldout or len(kept) == len(problems):
            raise InvalidConfig(
                f"{num_heldout} of {len(problems)} problems cannot be held out.",
                remedy="Widen low..high or lower num_heldout.",
            )
        heldout = [key for _, key in kept[:num_heldout]]
        train = [key for key, s in problems.items() if s >= heldout_share]
        super().__init__({"train": train, "heldout": heldout})

    def task(self, split: str, key: str) -> TaskData:
        """Return the problem, such as "35+40", with its result."""
        return TaskData(key=key, question=key, answer=Calculator()(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticDemonstrations:
    """Solutions of a problem: with probability `direct` without the tool, else with it."""

    direct: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.direct <= 1:
            raise InvalidConfig(
                f"direct is {self.direct}.", remedy="Use a probability from 0 to 1."
            )

    def __call__(self, task: TaskData, rng: random.Random) -> tuple[Message, ...]:
        """Return the messages after the prompt of a conversation that gets reward 1."""
        submit = Message(role="assistant", content=f"Result={task.answer}<submit>")
        if rng.random() < self.direct:
            return (submit,)
        request = f"<request><Calculator>{task.question}<call>"
        return (
            Message(role="assistant", content=request),
            Message(role="tool", content=f"{task.answer}<response>"),
            submit,
        )
