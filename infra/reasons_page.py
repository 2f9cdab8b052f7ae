"""Write docs/reasons.md from client/dialoop/reasons.py.

.venv/bin/python infra/reasons_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from dialoop.reasons import DropReason, Reason

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reasons.md"
HEAD = """# Reasons

Every error carries a `reason`, over gRPC, over REST and in the SDK. Match on the reason, not on the
message:

| where | how |
|---|---|
| Python | `error.reason is Reason.SESSION_LOST`, with `from dialoop.reasons import Reason` |
| REST | the field `reason` of the problem document |
| gRPC | the field `reason` of `google.rpc.ErrorInfo` |

`Reason.SESSION_LOST.meaning` is the sentence below. A reason that is not in this table came from an
environment of yours or from a newer service; the SDK gives it as an `OtherReason`.

`infra/reasons_page.py` writes this page from `client/dialoop/reasons.py`.
"""
DROPS = """
## Why the queue drops groups

`GetStats`, `summary.json` and the metrics count dropped groups by these names. A group that the
scorer or the trainer refuses is dropped under the refusal's reason in lower case.
"""
REASONS = """
## Why a call or a config is refused, or an episode fails
"""


def page() -> str:
    """Return the page's text."""
    return "".join(
        (HEAD, DROPS, "\n", _table(DropReason), REASONS, "\n", _table(Reason)),
    )


def _table(reasons: Iterable[Reason] | Iterable[DropReason]) -> str:
    rows = [f"| `{reason.value}` | {reason.meaning} |" for reason in reasons]
    return "\n".join(("| reason | meaning |", "|---|---|", *rows)) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
