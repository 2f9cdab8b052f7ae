"""A confined interpreter's whole life; what bubblewrap starts, and what the fork server forks."""

from __future__ import annotations

import sys
from typing import Any

from .confinement import confine
from .interpreter import serve


def work(rules: dict[str, Any]) -> None:
    """Give up everything, then run what comes."""
    sys.path.extend(rules["packages"])
    confine(rules)
    serve(rules["max_output_bytes"])
