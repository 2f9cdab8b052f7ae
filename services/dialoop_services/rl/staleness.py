"""How far data lags behind the policy: pure functions over policy versions.

With pipeline_depth 2 and 8 groups per train step, 24 groups may be outstanding. Tokens sampled
under main-4 have staleness 2 once main-6 is live; under max_staleness 1 their group is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from dialoop.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dialoop.sequences import PolicyVersion
    from numpy.typing import NDArray


def oldest_version(versions: Iterable[PolicyVersion]) -> PolicyVersion | None:
    """The lowest number of one lineage, or None of nothing; an error across lineages."""
    oldest: PolicyVersion | None = None
    for version in versions:
        if oldest is None or version.staleness_of(oldest) < 0:
            oldest = version
    return oldest


def is_stale(
    versions: Iterable[PolicyVersion], *, current: PolicyVersion, max_staleness: int | None
) -> bool:
    """Whether any version is of another lineage or lags more than `max_staleness` (None: no bound).

    is_stale([main-4, main-6], current=main-6, max_staleness=1)  # True: main-4 lags by 2
    """
    if max_staleness is None:
        return False
    return any(
        version.lineage != current.lineage or current.number - version.number > max_staleness
        for version in versions
    )


def token_staleness(versions: Sequence[PolicyVersion], current: PolicyVersion) -> NDArray[np.int64]:
    """int64 [M]: versions each token lags behind `current`; an error across lineages."""
    return np.array([current.staleness_of(version) for version in versions], dtype=np.int64)


def max_outstanding_groups(*, pipeline_depth: int, groups_per_train_step: int) -> int:
    """(pipeline_depth + 1) * groups_per_train_step; depth 0 generates and trains in turns."""
    if pipeline_depth < 0 or groups_per_train_step < 1:
        raise InvalidConfig(
            f"pipeline_depth is {pipeline_depth} and groups_per_train_step "
            f"{groups_per_train_step}.",
            remedy="Give a pipeline_depth of at least 0 and at least one group per train step.",
        )
    return (pipeline_depth + 1) * groups_per_train_step


def free_credits(*, max_outstanding: int, num_outstanding: int) -> int:
    """How many more groups may be started: never negative."""
    return max(0, max_outstanding - num_outstanding)
