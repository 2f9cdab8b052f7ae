"""Where the sequences of a trajectory leave each other."""

from __future__ import annotations

from typing import Any

from dialoop.testing import byte_tokenizer
from dialoop_ops.runs.forks import fork_tree


def sequence(prompt: list[int], sampled: list[int], turn: int, cause: str = "NONE") -> Any:
    return {
        "token_ids": [*prompt, *sampled],
        "fork_cause": cause,
        "segments": [
            {"start": 0, "length": len(prompt), "source": "PROMPT", "turn": None},
            {"start": len(prompt), "length": len(sampled), "source": "MODEL", "turn": turn},
        ],
    }


def test_a_trajectory_that_never_forked_is_one_branch():
    (branch,) = fork_tree({"sequences": [sequence([1, 2], [3], 0)]})
    assert (branch.parent, branch.num_shared, branch.turns) == (None, 0, (0,))
    assert (branch.before, branch.after) == ("", "")


def test_each_branch_names_the_sequence_that_it_shares_most_with_and_what_differs():
    first = sequence([1, 2], [3, 4, 5], 0)
    rewritten = sequence([1, 2, 3, 9, 6], [7], 1, "TEMPLATE_REWRITES_PAST")
    later = sequence([1, 2, 3, 9, 8], [7], 2, "HISTORY_REWRITTEN")
    tree = fork_tree({"sequences": [first, rewritten, later]})
    assert [(b.parent, b.num_shared, b.cause) for b in tree] == [
        (None, 0, "NONE"),
        (0, 3, "TEMPLATE_REWRITES_PAST"),
        (1, 4, "HISTORY_REWRITTEN"),
    ]
    assert (tree[1].before, tree[1].after) == ("[4, 5]", "[9, 6]")
    assert (tree[2].before, tree[2].after) == ("[6, 7]", "[8]")


def test_of_equal_places_the_latest_sequence_is_the_parent():
    same = [sequence([1, 2], [3], 0), sequence([1, 2], [4], 1), sequence([1, 2], [5], 2)]
    assert [b.parent for b in fork_tree({"sequences": same})] == [None, 0, 1]


def test_tokens_are_text_where_there_is_a_tokenizer_and_long_ones_are_cut():
    tokenizer = byte_tokenizer()
    before, after = tokenizer.encode("b" * 300).ids, tokenizer.encode("after").ids
    sequences = [
        sequence([], list(before), 0),
        sequence(list(after), [1], 1, "BRANCHED"),
    ]
    branch = fork_tree({"sequences": sequences}, tokenizer=tokenizer)[1]
    assert branch.before == "b" * 200 + " … 100 more tokens"
    assert branch.after == "after"
