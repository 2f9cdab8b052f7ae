"""Write to the terminal; all commands print through this module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str) -> None:
    """Print one line to the standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print an error in one line to the standard error."""
    sys.stderr.write(f"dialoop: {' '.join(text.split())}\n")


def rich_console() -> Console:
    """Return a console with colours on a terminal, and plain text elsewhere."""
    from rich.console import Console

    return Console(highlight=False)
