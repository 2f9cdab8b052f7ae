"""Pairs of a row and of what it has to say, compared, and the names that some test compares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from tests.support.metrics.names import general

BY_HAND: dict[str, dict[str, Callable[..., Any]]] = {}
"""The test that computes each name, by kind of row."""
Row = Mapping[str, Any]
Pairs = Iterator[tuple[Row, Row]]


class Between(NamedTuple):
    """Bounds of a time, from moments of the test's own clock."""

    low: float
    high: float


def by_hand(kind: str, *names: str) -> Callable[[Callable[..., Pairs]], Callable[..., None]]:
    """Compare the pairs of a test, each of these names at least once."""

    def wrap(test: Callable[..., Pairs]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **named: Any) -> None:
            compared: set[str] = set()
            for row, expected in test(*args, **named):
                for name, value in expected.items():
                    assert_same(name, row[name], value)
                    compared.add(general(name))
            assert compared >= set(names), set(names) - compared

        BY_HAND.setdefault(kind, {}).update(dict.fromkeys(names, run))
        return run

    return wrap


def assert_same(name: str, said: Any, expected: Any) -> None:
    if isinstance(expected, Between):
        assert expected.low <= said <= expected.high, (name, said, expected)
    elif isinstance(expected, dict):
        assert set(said) == set(map(str, expected)), name
        for key, value in expected.items():
            assert_same(f"{name}/{key}", said[str(key)], value)
    elif isinstance(expected, float):
        assert said == pytest.approx(expected, rel=5e-4, abs=2e-6), name
    else:
        assert (said, type(said)) == (expected, type(expected)), name
