"""Write to the terminal; all commands print through this module."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from rich.console import Console


def say(text: str) -> None:
    """Print one line to the standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print a value as one line of JSON to the standard output."""
    say(json.dumps(value, ensure_ascii=False))


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """Add --json, with which a command prints nothing but JSON to the standard output.

    Errors stay what they are: one line on the standard error, and an exit code above 0.
    """
    command.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def complain(text: str) -> None:
    """Print an error in one line to the standard error."""
    sys.stderr.write(f"dialoop: {' '.join(text.split())}\n")


def rich_console() -> Console:
    """Return a console with colours on a terminal, and plain text elsewhere."""
    from rich.console import Console

    return Console(highlight=False)
