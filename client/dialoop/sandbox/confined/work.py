"""The work of a confined interpreter, which bubblewrap starts or the fork server forks."""

from __future__ import annotations

import sys

from .confinement import confine
from .interpreter import serve

TYPE_CHECKING = False  # typing takes longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any


def work(rules: dict[str, Any]) -> None:
    """Confine this process, then serve code until the channel closes."""
    sys.path.extend(rules["packages"])
    confine(rules)
    serve(rules["max_output_bytes"])
