"""Which groups are too stale: one table for the rule and for everything that applies it."""

from __future__ import annotations

from dialoop.sequences import PolicyVersion


def main(number: int) -> PolicyVersion:
    return PolicyVersion(lineage="main", number=number)


def other(number: int) -> PolicyVersion:
    return PolicyVersion(lineage="other", number=number)


# (versions of a group's tokens, the live policy, max_staleness, whether the group is too stale)
CASES: tuple[tuple[tuple[PolicyVersion, ...], PolicyVersion, int | None, bool], ...] = (
    ((main(6),), main(6), 0, False),
    ((main(5),), main(6), 0, True),
    ((main(4),), main(6), 2, False),
    ((main(4),), main(6), 1, True),
    # The oldest token decides, wherever it stands.
    ((main(6), main(4), main(5)), main(6), 2, False),
    ((main(6), main(4), main(5)), main(6), 1, True),
    # Another lineage was given up, whatever its number.
    ((other(6),), main(6), 1000, True),
    ((main(6), other(6)), main(6), 1000, True),
    ((main(6),), other(0), 1000, True),
    # Without a bound nothing is too stale.
    ((main(0),), main(6), None, False),
    ((other(6),), main(6), None, False),
)
