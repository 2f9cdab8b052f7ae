"""Made instructions: kinds, held-out topics, and what an answer beside its topic earns."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import pytest
from dialoop.chat import History, Message
from dialoop.environments import Episode, TaskData
from dialoop.tasks.ifeval import IfEvalReward
from dialoop.tasks.ifeval_checks import CHECKS
from dialoop.tasks.instructions import INSTRUCTIONS, TOPICS, instruction_rows, instructions


def test_kinds_are_many_and_none_is_above_a_quarter() -> None:
    rows = instruction_rows(2000)
    kinds = Counter(chain.from_iterable(row["instruction_id_list"] for row in rows))
    assert len(kinds) >= 6
    assert set(kinds) <= set(CHECKS)
    assert max(kinds.values()) <= sum(kinds.values()) / 4
    assert Counter(len(row["instruction_id_list"]) for row in rows) == {1: 1000, 2: 1000}
    assert rows == instruction_rows(2000)
    assert rows != instruction_rows(2000, seed=1)


def test_held_out_topics_are_trained_nowhere() -> None:
    trained = {row["topic"] for row in instruction_rows(2000)}
    held = {row["topic"] for row in instruction_rows(200, heldout=True)}
    assert not trained & held
    assert trained | held == set(TOPICS)
    assert all(row["topic"] in row["prompt"] for row in instruction_rows(50))


END = next(row for row in INSTRUCTIONS if row[0] == "startend:end_checker")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("That is all.", 0.2),
        ("The sea. That is all.", 0.2),
        ("Seaside towns are full of people who walk about in the sun. That is all.", 1.0),
        ("A train is a long row of cars that runs on two rails. That is all.", 0.2),
        ("The sea is wide and blue, and no one has seen all of it.", 0.0),
        ("", 0.0),
    ],
)
async def test_an_answer_that_is_short_or_beside_its_topic_earns_a_fifth(
    answer: str, value: float
) -> None:
    name, arguments, words = END
    row = {"instruction_id_list": json.dumps([name]), "kwargs": json.dumps([arguments])}
    reward = IfEvalReward(aggregator="about_topic", in_blocks=False)
    said = Message(role="assistant", content=answer)
    task = TaskData(key="0", question=words, metadata=row | {"topic": "the sea"})
    episode = Episode(task=task, seed=0, history=History((said,)), answer=said, terminated=True)
    score = await reward.score(episode)
    assert score.rewards[0].value == pytest.approx(value)
    told = score.rewards[0].feedback.split("\n")
    follows = answer.endswith("That is all.")
    assert ("End with exactly this phrase: That is all." in told) is not follows
    is_beside = value == 0.2 or not answer
    assert ("Write at least 10 words about the sea." in told) is is_beside
    assert (score.rewards[0].feedback == "") is (value == 1.0)
    await reward.release()


def test_the_environment_has_both_splits() -> None:
    environment = instructions(num_train=10, num_heldout=4)
    assert [len(environment.tasks.keys(split)) for split in environment.tasks.splits] == [10, 4]
