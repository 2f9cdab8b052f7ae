"""How far data lags behind the policy."""

from __future__ import annotations

import pytest
from dialoop.errors import InvalidConfig, InvalidSequence
from dialoop.sequences import PolicyVersion
from dialoop_services.rl.staleness import (
    free_credits,
    is_stale,
    max_outstanding_groups,
    oldest_version,
    token_staleness,
)


def main(number: int) -> PolicyVersion:
    return PolicyVersion(lineage="main", number=number)


OTHER = PolicyVersion(lineage="other", number=6)


def test_the_oldest_version_decides() -> None:
    versions = [main(5), main(4), main(6)]
    assert oldest_version(versions) == main(4)
    assert not is_stale(versions, current=main(6), max_staleness=2)
    assert is_stale(versions, current=main(6), max_staleness=1)


def test_nothing_sampled_is_never_stale() -> None:
    assert oldest_version([]) is None
    assert not is_stale([], current=main(6), max_staleness=0)


def test_another_lineage_is_stale_whatever_its_number() -> None:
    assert is_stale([OTHER], current=main(6), max_staleness=1000)
    assert not is_stale([OTHER], current=main(6), max_staleness=None)


def test_staleness_is_counted_per_token_and_not_across_lineages() -> None:
    assert token_staleness([main(4), main(6)], main(6)).tolist() == [2, 0]
    with pytest.raises(InvalidSequence):
        token_staleness([OTHER], main(6))


def test_depth_two_keeps_three_train_steps_outstanding() -> None:
    assert max_outstanding_groups(pipeline_depth=2, groups_per_train_step=8) == 24
    assert max_outstanding_groups(pipeline_depth=0, groups_per_train_step=8) == 8
    with pytest.raises(InvalidConfig):
        max_outstanding_groups(pipeline_depth=-1, groups_per_train_step=8)


def test_credits_are_never_negative() -> None:
    assert free_credits(max_outstanding=8, num_outstanding=5) == 3
    assert free_credits(max_outstanding=4, num_outstanding=5) == 0
