"""Two-digit sums as tasks, and how they may be solved.

user       35+40
assistant  <request><Calculator>35+40<call>
tool       75<response>
assistant  Result=75<submit>                    reward 1
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dialoop.chat import Message
from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import TaskSource, share_of, task_not_found
from dialoop.environments.tools.calculator import Calculator
from dialoop.errors import InvalidConfig


class ArithmeticTasks(TaskSource):
    """All problems `a+b` (and `a-b` with a >= b) of a range, one tenth of them kept from training.

    "heldout" is the `num_heldout` of that tenth that hash lowest; the rest of it is not used. Which
    tenth is decided by the two numbers, so 40+35 is never trained when 35+40 is held out.
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
                f"Arithmetic with operations '{operations}' on {low}..{high} is not possible.",
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
        heldout = tuple(key for _, key in kept[:num_heldout])
        train = tuple(key for key, s in problems.items() if s >= heldout_share)
        self._keys = {"train": train, "heldout": heldout}
        self._members = {split: frozenset(keys) for split, keys in self._keys.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        """("train", "heldout")."""
        return tuple(self._keys)

    def keys(self, split: str) -> Sequence[str]:
        """Problems as "35+40"."""
        return self._keys[self.require_split(split)]

    def get(self, split: str, key: str) -> TaskData:
        """The problem with its result."""
        split = self.require_split(split)
        if key not in self._members[split]:
            raise task_not_found(split, key)
        return TaskData(key=key, question=key, answer=Calculator()(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticDemonstrations:
    """How a problem may be solved: guessed directly with this probability, else by the tool."""

    direct: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.direct <= 1:
            raise InvalidConfig(f"direct is {self.direct}.", remedy="Give a probability.")

    def __call__(self, task: TaskData, rng: random.Random) -> tuple[Message, ...]:
        """The messages after the prompt, of a conversation that gets reward 1."""
        submit = Message(role="assistant", content=f"Result={task.answer}<submit>")
        if rng.random() < self.direct:
            return (submit,)
        request = f"<request><Calculator>{task.question}<call>"
        return (
            Message(role="assistant", content=request),
            Message(role="tool", content=f"{task.answer}<response>"),
            submit,
        )
