"""docs/reasons.md is what infra/reasons_page.py writes today, and no row of it is broken."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from dialoop.reasons import DropReason, Reason

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reasons.md"


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "infra" / "reasons_page.py"))["page"]
    assert PAGE.read_text("utf-8") == page(), "run .venv/bin/python infra/reasons_page.py"


def test_every_reason_has_one_row_with_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M)
    assert rows == [(reason.value, reason.meaning) for reason in (*DropReason, *Reason)]
    assert all(meaning.endswith((".", ")")) for _, meaning in rows)
