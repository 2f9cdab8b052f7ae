"""The ready-made column_addition: sums by columns before `#### N`, or guessed."""

import random
import re
from typing import Any

import pytest
from dialoop.chat import Message
from dialoop.environments import ChatEnv, load_environment
from dialoop.errors import InvalidConfig
from dialoop.tasks.column_addition import column_addition, columns, final_number
from dialoop.trajectory import DoneReason


@pytest.fixture(scope="module")
def environment() -> ChatEnv:
    return column_addition()


async def _answer(environment: ChatEnv, text: str, *, is_complete: bool = True) -> Any:
    opening = environment.reset(environment.tasks.get("train", "35+47"), seed=0)
    message = Message(role="assistant", content=text, is_complete=is_complete)
    return await environment.step(opening.episode, opening.history.respond(message))


@pytest.mark.parametrize(
    ("text", "reward", "reason"),
    [
        ("5+7=12 3+4+1=8 #### 82", 1.0, DoneReason.CONTENT),
        ("#### 82", 1.0, DoneReason.CONTENT),
        ("5+7=12 3+4+1=8 #### 72", 0.0, DoneReason.CONTENT),
        ("#### 82 or so", 0.0, DoneReason.CONTENT),
        ("82", 0.0, DoneReason.CONTENT),
        ("", 0.0, DoneReason.CONTENT),
    ],
)
async def test_only_the_number_at_the_end_counts(
    environment: ChatEnv, text: str, reward: float, reason: DoneReason
) -> None:
    outcome = await _answer(environment, text)
    assert [r.value for r in outcome.rewards] == [reward]
    assert outcome.episode.done_reason is reason


async def test_a_sum_that_was_cut_off_earns_nothing(environment: ChatEnv) -> None:
    outcome = await _answer(environment, "#### 82", is_complete=False)
    assert [r.value for r in outcome.rewards] == [0.0]
    assert outcome.episode.done_reason is DoneReason.INCOMPLETE


@pytest.mark.parametrize(
    ("a", "b", "reasoning"),
    [(35, 47, "5+7=12 3+4+1=8"), (10, 20, "0+0=0 1+2+0=3"), (99, 99, "9+9=18 9+9+1=19")],
)
def test_columns_are_added_from_the_last_with_their_carry(a: int, b: int, reasoning: str) -> None:
    assert columns(a, b) == reasoning


async def test_every_demonstration_is_right_and_four_in_ten_reason(environment: ChatEnv) -> None:
    rng, reasoned = random.Random(0), 0
    for key in rng.sample(list(environment.tasks.keys("train")), 500):
        task = environment.tasks.get("train", key)
        *_, answer = environment.demonstration(task, rng)
        assert final_number(answer.text) == str(eval(key))
        for left, right in re.findall(r"([\d+]+)=(\d+)", answer.text):
            assert sum(map(int, left.split("+"))) == int(right)
        reasoned += "=" in answer.text
    assert 170 <= reasoned <= 230


def test_it_is_loaded_by_name_with_its_options() -> None:
    use = "dialoop.tasks.column_addition:column_addition"
    loaded = load_environment(use, {"num_heldout": 16})
    assert loaded.tasks.num_tasks("heldout") == 16
    with pytest.raises(InvalidConfig):
        load_environment(use, {"direct": 1.5})
