"""What the docs say was measured is what a file of benchmarks/results holds.

Below a table stands where its numbers are from: the columns' keys, then one place for each row,
`FILE/key/key`, or two with ` : ` between them for a quotient.

    <!-- figures: step_s, step_cpu_s
    train_step/runs/4/ways/ours
    train_step/runs/4/ways/trl
    -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
COMPARISONS = ROOT / "docs" / "benchmarks.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"((?:^\|.*\|\n)+)(?:\n<!-- figures: (.*)\n((?:.*\n)*?)-->)?", re.M)


def tables(page: Path) -> Iterator[tuple[list[list[str]], list[str], list[str]]]:
    """Yield each table's rows without its head, the columns' keys, and the rows' places."""
    for body, columns, places in TABLE.findall(page.read_text("utf-8")):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]
        ]
        yield rows, columns.split(", ") if columns else [], places.splitlines()


def measured(place: str, column: str) -> Any:
    """Return what stands in the results at a row's place, or the quotient of two."""
    values = []
    for part in place.split(" : "):
        file, *keys = f"{part}/{column}".split("/")
        value: Any = json.loads((RESULTS / f"{file}.json").read_text("utf-8"))
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        values.append(value)
    return values[0] if len(values) == 1 else values[0] / values[1]


def says(cell: str, value: Any) -> bool:
    """Return whether a cell has a value, rounded to the digits that it shows."""
    if not isinstance(value, int | float):
        return cell == ("never" if value is None else value)
    number = cell.replace(",", "")
    _, _, decimals = number.partition(".")
    zeros = len(number) - len(number.rstrip("0"))
    last_digit = -len(decimals) if decimals else zeros if zeros > 1 else 0
    return abs(float(number) - value) <= 0.5001 * 10.0**last_digit


def test_numbers_are_those_of_their_results() -> None:
    checked = 0
    for page in PAGES:
        for rows, columns, places in tables(page):
            if not columns:
                continue
            assert len(rows) == len(places), f"{page.name}: {rows[0]} has {len(places)} places"
            for (_, *cells), place in zip(rows, places, strict=True):
                assert len(cells) == len(columns), f"{page.name}: {cells} and {columns}"
                for cell, column in zip(cells, columns, strict=True):
                    value = measured(place, column)
                    assert says(cell, value), f"{page.name}: {cell}, {place}/{column} is {value}"
                    checked += 1
    assert checked > 50


def test_every_figure_of_the_comparisons_has_its_place() -> None:
    for rows, columns, _ in tables(COMPARISONS):
        for row in rows:
            assert columns or not re.search(r"\d", "".join(row[1:])), row
    text = COMPARISONS.read_text("utf-8")
    prose = re.sub(r"^\|[^\n]*$|<!--.*?-->|`[^`]*`", "", text, flags=re.S | re.M)
    assert not re.search(r"\d\.\d|\d %|\d times", prose)


@pytest.mark.parametrize(
    ("cell", "value", "holds"),
    [
        ("1.76", 1.757, True),
        ("1.76", 1.77, False),
        ("0.6", 1.76, False),
        ("16,400", 16373.08, True),
        ("16,000", 16373.08, True),
        ("17,000", 16373.08, False),
        ("380", 378, False),
        ("3", 3, True),
        ("never", None, True),
        ("1.0", None, False),
        ("weights_never_arrived", "weights_never_arrived", True),
    ],
)
def test_a_cell_says_its_value_or_not(cell: str, value: Any, holds: bool) -> None:
    assert says(cell, value) == holds
