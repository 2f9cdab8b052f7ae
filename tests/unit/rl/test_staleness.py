"""How far data may lag behind the policy."""

from __future__ import annotations

import pytest
from dialoop.sequences import PolicyVersion
from dialoop_learning.rl.staleness import is_stale

from tests.support.samples.staleness_samples import CASES, main


@pytest.mark.parametrize(("versions", "current", "max_staleness", "expected"), CASES)
def test_staleness_follows_the_table(
    versions: tuple[PolicyVersion, ...],
    current: PolicyVersion,
    max_staleness: int | None,
    expected: bool,
) -> None:
    assert is_stale(versions, current=current, max_staleness=max_staleness) is expected


def test_nothing_sampled_is_never_stale() -> None:
    assert not is_stale([], current=main(6), max_staleness=0)
