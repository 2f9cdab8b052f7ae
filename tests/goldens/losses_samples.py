"""The tensors of the loss goldens, padded lists of 6 sequences by 6 tokens, and their variants."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

LENGTHS = [5, 3, 6, 4, 2, 6]
"""Completion tokens of each sequence; three sequences of one prompt, three of another."""

PROMPTS = [[11, 12], [13, 14, 15]]
GROUP_SIZE = 3
MAX_COMPLETION_LENGTH = 8
REWARDS = [1.0, -0.5, 0.5, 0.5, -1.25, 2.0]
UNTRAINED = [(0, 2), (2, 1), (2, 2), (5, 2), (5, 4)]
"""(sequence, token) that the environment wrote."""

TURN_REWARDS = [[0.25, -1.0], [0.5], [1.5, 0.0, 2.0], [0.75, -0.5]]
"""Rewards of the turns of four trajectories of one group."""

DISTANCES = {"old": 0.6, "sampler": 0.6, "ref": 0.5}
"""Standard deviations of the log-ratios of the policy to the others: far enough that clips bite."""


def draw_tensors(seed: int = 20261003) -> dict[str, Any]:
    """policy, old, sampler, ref (log-probs, nats), entropy, tokens and trained, all 6 by 6."""
    rng = random.Random(seed)
    rows, width = len(LENGTHS), max(LENGTHS)

    def table(cell: Any) -> list[list[Any]]:
        return [[cell(row, column) for column in range(width)] for row in range(rows)]

    policy = table(lambda _r, _c: -rng.uniform(0.4, 3.0))
    tensors: dict[str, Any] = {"lengths": LENGTHS, "rewards": REWARDS, "policy": policy}
    for name, distance in DISTANCES.items():
        tensors[name] = table(lambda r, c, d=distance: min(policy[r][c] + rng.gauss(0.0, d), -0.01))
    tensors["entropy"] = table(lambda _r, _c: rng.uniform(0.1, 2.0))
    tensors["tokens"] = table(lambda _r, _c: rng.randrange(20, 200))
    tensors["trained"] = table(lambda r, c: (r, c) not in UNTRAINED and c < LENGTHS[r])
    return tensors


def variant(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """The tensors, changed as `name` says.

    plain: not at all. all_trained: the policy wrote every token. on_policy: and was the policy
    that sampled. one_token: one token per sequence. wild: one token with a log-ratio of 25.
    """
    changed = deepcopy(tensors)
    if name == "wild":
        changed["policy"][1][0], changed["old"][1][0] = -0.01, -25.01
    if name == "one_token":
        changed["lengths"] = [1] * len(LENGTHS)
    if name in ("all_trained", "on_policy", "one_token"):
        changed["trained"] = [
            [column < length for column in range(max(LENGTHS))] for length in changed["lengths"]
        ]
    if name == "on_policy":
        changed["old"] = deepcopy(changed["policy"])
    return changed
