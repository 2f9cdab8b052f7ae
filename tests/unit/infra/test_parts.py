"""A run's parts hold every file once."""

from __future__ import annotations

import pytest

from tests.conftest import part_of

FILES = [f"tests/test_{index}.py" for index in range(11)]


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_parts_hold_every_file_once_and_as_many_as_the_others(count: int) -> None:
    parts = [part_of(reversed(FILES * 2), f"{index + 1}/{count}") for index in range(count)]
    assert sorted(file for part in parts for file in part) == sorted(FILES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["", "0/3", "4/3", "1", "1/0", "a/b", "1/3/5"])
def test_a_part_that_does_not_exist_is_an_error(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="PART=i/n"):
        part_of(FILES, part)
