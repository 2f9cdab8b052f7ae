"""When data is too old to train on.

The trainer and the queue in memory call this rule. The queue in Redis repeats it in
`lease_groups.lua`. A table of cases tests that all three agree
(`tests/support/samples/staleness_samples.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
