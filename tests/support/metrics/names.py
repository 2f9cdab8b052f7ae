"""The names of metrics.jsonl, as docs/metrics.md has them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
EVERY_ROW = "every row"
"""Stands for the names that rows of all kinds have."""


def names_in_docs() -> dict[str, set[str]]:
    """The names by kind, as the page's tables have them."""
    kinds: dict[str, set[str]] = {}
    kind = ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kind = (re.findall("`([a-z_]+)`", line) or [line.removeprefix("## ").lower()])[0]
        elif line.startswith("| `"):
            first, second = line.split("|")[1:3]
            names, explained = (re.findall("`([^`]+)`", text) for text in (first, second))
            if kind == "other kinds":
                (name,) = names
                kinds[name] = set(explained)
            else:
                kinds.setdefault(kind, set()).update(names)
    return kinds


def general(name: str) -> str:
    """`rewards/right/mean` as the page writes it."""
    name = re.sub("^trial_reward/.*$", "trial_reward/<number>", name)
    return re.sub("^rewards/.*/(mean|std)$", r"rewards/<name>/\1", name)
