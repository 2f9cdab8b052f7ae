from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dialoop_learning.rl.buckets import length_bin, share_table
from dialoop_ops.stack.report.summary import lengths


def test_bins_end_at_powers_of_two() -> None:
    sizes = [0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025]
    assert [length_bin(size) for size in sizes] == [0, 1, 2, 4, 4, 8, 8, 16, 1024, 2048]


def test_each_share_is_of_its_own_total() -> None:
    assert share_table({8: 3, 64: 1}, {8: 2}) == [(8, 0.75, 1.0), (64, 0.25, 0.0)]
    assert share_table({}, {}) == []


def test_the_summary_adds_the_collectors_and_reads_counts_from_json() -> None:
    """JSON's keys are strings, and there they would be sorted as words."""
    findings: Any = SimpleNamespace(
        collectors=(
            {"training": {"lengths": {"8": 1, "16": 2}}},
            {"training": {"lengths": {"16": 3, "128": 1}}},
        ),
        trainer={"trained_lengths": {"128": 1, "16": 4}},
    )
    distributions = lengths(findings)
    assert distributions == {"generated": {8: 1, 16: 5, 128: 1}, "trained": {16: 4, 128: 1}}
    assert list(distributions["trained"]) == [16, 128]
