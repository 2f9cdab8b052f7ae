"""When data is too old to train on.

The trainer and the queue in memory call this rule. The queue in Redis repeats it in
`lease_groups.lua`. A table of cases tests that all three agree
(`tests/support/samples/staleness_samples.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from dialoop.sequences import PolicyVersion


def is_stale(
    versions: Iterable[PolicyVersion], *, current: PolicyVersion, max_staleness: int | None
) -> bool:
    """Return whether any version is of another lineage or lags by more than `max_staleness`.

    With `max_staleness` None no version is too old.

    v4, v6 = (PolicyVersion(lineage="main", number=n) for n in (4, 6))
    is_stale([v4, v6], current=v6, max_staleness=1)     # True: v4 lags by 2
    """
    if max_staleness is None:
        return False
    return any(
        version.lineage != current.lineage or current.number - version.number > max_staleness
        for version in versions
    )


def publish_order(version: PolicyVersion) -> tuple[int, int]:
    """Return the place of a version among all of its run: main.2-7 gives (2, 7).

    A restart that gives published versions up begins main.1, the next one main.2. The times of
    files say less, since a clock may jump.
    """
    generation = version.lineage.partition(".")[2]
    return int(generation) if generation.isdecimal() else 0, version.number


def version_of_name(name: str) -> PolicyVersion:
    """Return the version that a folder is named after; number -1 if it is named otherwise."""
    lineage, _, number = name.rpartition("-")
    return PolicyVersion(lineage=lineage, number=int(number) if number.isdecimal() else -1)
