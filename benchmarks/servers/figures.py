"""Print what a benchmark measured, and refuse to print nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def print_figures(
    facts: Mapping[str, Any], figures: Mapping[Any, Any], *, indent: int | None = 2
) -> None:
    """Print both as one JSON object; raise SystemExit where no figure is other than zero."""
    if not _holds_number(figures):
        raise SystemExit(
            f"Nothing was measured: no figure is other than zero. Found: {dict(figures)}"
        )
    sys.stdout.write(json.dumps({**facts, **figures}, indent=indent) + "\n")
    sys.stdout.flush()


def _holds_number(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_number, value))
    return isinstance(value, int | float) and bool(value) and not math.isnan(value)
