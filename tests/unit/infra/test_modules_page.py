"""docs/modules.md is what infra/modules_page.py writes today, and every module has a line."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "modules.md"


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "infra" / "modules_page.py"))["page"]
    assert PAGE.read_text("utf-8") == page(), "run .venv/bin/python infra/modules_page.py"


def test_every_module_says_what_it_does() -> None:
    assert "` |  |" not in PAGE.read_text("utf-8")
