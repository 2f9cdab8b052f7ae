"""docs/features.md has 112 rows; each names files and tests that exist and are run by default."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NUM_ROWS = 112
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
ROWS = ROW.findall((ROOT / "docs" / "features.md").read_text("utf-8"))


@lru_cache
def names_in(path: str) -> dict[str, bool]:
    """Return the tests of a file, and whether the default run plays each."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {
        node.name: not any("heavy" in ast.unparse(d) for d in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"
    }


def test_it_has_112_rows_in_order() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, NUM_ROWS + 1))
    assert len({what for _, what, *_ in ROWS}) == NUM_ROWS


@pytest.mark.parametrize(("number", "what", "where", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_files_and_tests_that_exist(
    number: str, what: str, where: str, tests: str
) -> None:
    files, named = re.findall(r"`([^`]+)`", where), re.findall(r"`([^`]+)`", tests)
    assert what.strip()
    assert files
    for file in files:
        assert (ROOT / file).exists(), f"row {number} names {file}"
    assert named
    is_in_default_run = []
    for test in named:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"row {number} names {test}"
        is_in_default_run.append(names_in(path)[name])
    assert any(is_in_default_run), f"row {number} has heavy tests alone"
