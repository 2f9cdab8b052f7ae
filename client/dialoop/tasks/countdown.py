"""Countdown: reach a target with given numbers, each at most once, by + - * /.

user: Reach 24 with 4, 6, 8 ... assistant: <answer>(8 - 4) * 6</answer>: reward 1
"""

from __future__ import annotations

import ast
import json
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag, EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score, TaskData
from dialoop.environments.tasks.source import ListedTasks, share_of
from dialoop.environments.tools.answer_tags import tag_text
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import Reward

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200


class CountdownTasks(ListedTasks):
    """Tasks made from their number, so that a key is the same task on every machine."""

    def __init__(
        self, *, num_tasks: int = 10_000, num_numbers: int = 4, high: int = 99, heldout: float = 0.1
    ) -> None:
        if num_tasks < 1 or not 2 <= num_numbers <= 8 or high < 2 or not 0 < heldout < 1:
            raise InvalidConfig(
                "A setting of the countdown tasks is out of range.",
                remedy="Use num_tasks >= 1, num_numbers 2 to 8, high >= 2 and 0 < heldout < 1.",
            )
        keys = [str(number) for number in range(num_tasks)]
        super().__init__(
            {
                "train": [key for key in keys if share_of(key) >= heldout],
                "heldout": [key for key in keys if share_of(key) < heldout],
            }
        )
        self._num_numbers, self._high = num_numbers, high

    def task(self, split: str, key: str) -> TaskData:
        """Return the task: some numbers and a target that they reach."""
        numbers, target = _puzzle(random.Random(f"countdown:{key}"), self._num_numbers, self._high)
        listed = ", ".join(map(str, numbers))
        question = (
            f"Reach {target} with the numbers {listed}: use each at most once, with + - * / and "
            "parentheses. Give the expression between <answer> and </answer>."
        )
        data = {"numbers": json.dumps(numbers), "target": str(target)}
        return TaskData(key=key, question=question, answer=str(target), metadata=data)


def _puzzle(random_: random.Random, count: int, high: int) -> tuple[list[int], int]:
    while True:
        numbers = [random_.randint(1, high) for _ in range(count)]
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            value = random_.choice(list(_OPERATORS.values()))(value, Fraction(number))
        if value.denominator == 1 and 0 < value <= 10 * high and int(value) not in numbers:
            return sorted(numbers), int(value)


def value_of(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """Return the value of an expression over the numbers; None if it breaks a rule."""
    if len(expression) > _MAX_CHARACTERS:
        return None
    used: Counter[int] = Counter()
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if not used - Counter(numbers) else None


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, used), _value(node.right, used)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not arithmetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownReward(Transform):
    """Reward 1 for an expression that reaches the target, `form` for another valid one, else 0."""

    form: float = 0.1

    @property
    def traits(self) -> Traits:
        """Return the reward's name."""
        return Traits(reward_names=("countdown",))

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over."""
        if not episode.done:
            return Score()
        data = episode.task.metadata
        expression = tag_text(episode.answer_text, "answer")
        value = None if expression is None else value_of(expression, json.loads(data["numbers"]))
        right = value == int(data["target"])
        earned = 1.0 if right else 0.0 if value is None else self.form
        return Score(rewards=(Reward(name="countdown", value=earned, success=right),))


def countdown(
    *, num_tasks: int = 10_000, num_numbers: int = 4, high: int = 99, form: float = 0.1
) -> ChatEnv:
    """Return the `countdown` environment."""
    return ChatEnv(
        name="countdown",
        description="Reach a target with given numbers.",
        tasks=CountdownTasks(num_tasks=num_tasks, num_numbers=num_numbers, high=high),
        transforms=(EndOnTag(), EndWhenIncomplete(), OneTurn(), CountdownReward(form=form)),
        redo="safe",
    )
