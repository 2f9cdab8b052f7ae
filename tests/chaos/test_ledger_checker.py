"""The checker finds each kind of loss that is planted in whole books, and nothing in whole ones."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger_checker
from tests.chaos.ledger_checker import Queue, problems_of

MAX_STALENESS = 2


def record_of(state: str) -> dict[str, Any]:
    num_finished = 0 if state == "offered" else 2
    return {"purpose": 1, "state": state, "num_members": 2, "num_finished": num_finished}


class Books:
    """A run of three steps with two groups each, one group dropped and one left."""

    def __init__(self) -> None:
        names = [f"arithmetic/train/0/{n}+1" for n in range(8)]
        states = ["consumed"] * 6 + ["dropped", "offered"]
        self.records: dict[str, dict[str, Any]] = {
            name: record_of(state) for name, state in zip(names, states, strict=True)
        }
        self.counts = {
            "1:offered": 1,
            "1:consumed": 6,
            "1:dropped:uniform_reward": 1,
            "1:trajectories:generated": 14,
            "1:trajectories:consumed": 12,
            "1:trajectories:dropped:uniform_reward": 2,
        }
        self.cursor = "0:8"
        self.rows = [
            self.row(name, member, step=number // 2 + 1, outcome="trained")
            for number, name in enumerate(names[:6])
            for member in range(2)
        ]
        self.rows += [self.row(names[6], m, step=3, outcome="uniform_reward") for m in range(2)]
        self.metrics = [
            {"kind": "train", "train_step": step, "policy_version": step + 1, "lineage": "main"}
            for step in (1, 2, 3)
        ]

    @staticmethod
    def row(group: str, member: int, *, step: int, outcome: str) -> dict[str, Any]:
        segments = [
            {"source": "PROMPT", "policy_version": None},
            {"source": "MODEL", "policy_version": max(1, step - 1)},
        ]
        return {
            "outcome": outcome,
            "group_id": group,
            "trajectory_id": f"{group}#{member}",
            "train_step": step,
            "lineage": "main",
            "sequences": [{"segments": segments}],
        }

    def problems(self) -> list[str]:
        queue = Queue(records=self.records, counts=self.counts, cursor=self.cursor)
        return problems_of(queue, self.rows, self.metrics, max_staleness=MAX_STALENESS)


def first(books: Books) -> str:
    return next(iter(books.records))


def lose_a_task(books: Books) -> None:
    del books.records[list(books.records)[-1]]
    books.counts["1:offered"] = 0


def offer_a_task_twice(books: Books) -> None:
    books.records["again/arithmetic/train/0/0+1"] = record_of("offered")
    books.counts["1:offered"], books.cursor = 2, "0:9"


def miscount(books: Books) -> None:
    books.counts["1:consumed"] = 7


def leave_a_lease(books: Books) -> None:
    books.records[first(books)]["state"] = "trained"
    books.counts |= {"1:consumed": 5, "1:trained": 1}


def play_a_member_again(books: Books) -> None:
    books.counts["1:trajectories:generated"] += 1


def forget_a_trained_group(books: Books) -> None:
    books.rows = [row for row in books.rows if row["group_id"] != first(books)]


def train_what_was_dropped(books: Books) -> None:
    books.records[first(books)]["state"] = "dropped"
    books.counts["1:consumed"] = 5


def train_a_group_twice(books: Books) -> None:
    books.rows += [{**row, "train_step": 3} for row in books.rows[:2]]


def train_a_trajectory_in_two_groups(books: Books) -> None:
    books.rows[2]["trajectory_id"] = books.rows[0]["trajectory_id"]


def train_a_member_too_many(books: Books) -> None:
    books.rows.append({**books.rows[0], "trajectory_id": "extra"})


def train_too_late(books: Books) -> None:
    books.rows[10]["sequences"][0]["segments"][1]["policy_version"] = 0


def skip_a_step(books: Books) -> None:
    books.metrics = [row for row in books.metrics if row["train_step"] != 2]


PLANTED = {
    lose_a_task: "8 tasks were read, and the ledger has 7",
    offer_a_task_twice: "task 0/0+1 has 2 ids",
    miscount: "6 records are consumed, and the count is 7",
    leave_a_lease: "still leased by a trainer that has ended",
    play_a_member_again: "15 members were finished, and the groups have 14",
    forget_a_trained_group: "is consumed and was never trained",
    train_what_was_dropped: "was trained, and the queue says dropped",
    train_a_group_twice: "was trained in steps [1, 3]",
    train_a_trajectory_in_two_groups: "was trained in 2 groups",
    train_a_member_too_many: "has 2 members, and 3 were trained",
    train_too_late: "lagged 3 versions in step 3",
    skip_a_step: "train steps are missing: [2]",
}


def test_whole_books_have_no_problem():
    books = Books()
    assert books.problems() == []
    # A step that a killed trainer repeats writes its rows again.
    books.rows += copy.deepcopy(books.rows[8:])
    assert books.problems() == []


def test_a_step_that_was_taken_back_and_done_again_with_other_groups_is_no_loss():
    books = Books()
    lost = [
        {**row, "lineage": "main", "group_id": "g", "train_step": 3} for row in books.rows[8:10]
    ]
    books.rows = [*books.rows[:8], *lost, *books.rows[8:]]
    redone = {**books.metrics[2], "lineage": "main.1"}
    books.metrics += [{"kind": "restore", "train_step": 2}, redone]
    for row in books.rows[10:]:
        row["lineage"] = "main.1"
    assert books.problems() == []
    books.metrics.pop()  # and one that was not done again is a loss
    assert any("was never trained" in problem for problem in books.problems())


@pytest.mark.parametrize(
    ("plant", "sentence"), PLANTED.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_a_planted_loss_is_found(plant: Callable[[Books], None], sentence: str) -> None:
    books = Books()
    plant(books)
    assert any(sentence in problem for problem in books.problems()), books.problems()


def test_the_checker_imports_nothing_of_ours():
    tree = ast.parse(Path(ledger_checker.__file__).read_text())
    names = [
        name.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert not [name for name in names if "dialoop" in name or name.startswith("tests")]
