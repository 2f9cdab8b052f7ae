"""Print the services' records on the terminal as one stream, each line with its service.

Each service writes runs/<name>/logs/<service>.log itself. What other libraries print there (vLLM's
start-up, Redis) stays in the file; records in Dialoop's format also reach the terminal.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<message>.*)$")
# Left out, since the line starts with the service and all lines are of one run.
_IDENTITY = re.compile(r"\[service=\S+?( run=\S+?)?(?= |\]$) ?")
_SEVERITY = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "CRITICAL": 4}
_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_POLL_S = 0.3
_SECONDS, _WIDTH = 7, 12


class LogStream:
    """Prints log lines on the terminal, and keeps the reading positions in the services' files."""

    def __init__(self, console: Console, directory: Path, *, least: str = "INFO") -> None:
        self._console = console
        self._directory = directory
        self._least = _SEVERITY[least]
        self._started = time.monotonic()
        self._positions: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the stack began, as every line shows them."""
        return time.monotonic() - self._started

    @property
    def margin(self) -> int:
        """Return the columns that stand before the text of each line."""
        return _SECONDS + len(" s  ") + _WIDTH

    def path_of(self, service: str) -> Path:
        """Return the file of a service's whole output, and follow it from its present end on."""
        path = self._directory / f"{service}.log"
        self._positions.setdefault(service, path.stat().st_size if path.exists() else 0)
        return path

    def say(self, service: str, text: str, *, style: str = "") -> None:
        """Print a line of the stack itself about a service."""
        line = Text(f"{self.elapsed_s:{_SECONDS}.1f} s  ", style="dim")
        line.append(f"{service:<{_WIDTH}}", style=_COLOURS[sum(service.encode()) % len(_COLOURS)])
        line.append(text, style=style)
        try:
            self._console.print(line, soft_wrap=True)
        except OSError as error:
            # Output that goes to a file on a full disk must not end the stack.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise

    def last_line(self, service: str) -> str:
        """Return the last line that a program wrote."""
        tail = self._tail(service)
        return next((line.strip() for line in reversed(tail) if line.strip()), "")

    async def follow(self) -> None:
        """Print new records until cancelled."""
        while True:
            self.flush()
            await asyncio.sleep(_POLL_S)

    def flush(self) -> None:
        """Print what the services have written since the last call."""
        for service in list(self._positions):
            for line in self._new_lines(service):
                self._print_record(service, line)

    def _print_record(self, service: str, line: str) -> None:
        record = _RECORD.match(line)
        if record and _SEVERITY.get(record["level"], 1) >= self._least:
            message = _IDENTITY.sub("[", record["message"]).removesuffix(" []")
            self.say(service, message, style=_STYLES.get(record["level"], ""))

    def _new_lines(self, service: str) -> list[str]:
        path = self._directory / f"{service}.log"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._positions[service])
            content = file.read()
        whole, newline, _ = content.rpartition(b"\n")
        self._positions[service] += len(whole) + len(newline)
        return whole.decode("utf-8", errors="replace").splitlines()

    def _tail(self, service: str, num_bytes: int = 8192) -> list[str]:
        path = self._directory / f"{service}.log"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode("utf-8", errors="replace").splitlines()
