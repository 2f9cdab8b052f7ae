"""End what a killed stack leaves behind: read its processes' pids from a pipe until that breaks.

The stack writes "+4711" when it starts a process and "-4711" when that has ended. A stack that is
killed with SIGKILL cannot clean up, but its end of the pipe closes all the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from dialoop_services.runtime.access.principals import without_tokens

from dialoop_ops.stack.processes.processes import kill_members, members

_GRACE_S = 8.0


class Guardian:
    """The stack's side of the pipe: it reports started processes until it is closed."""

    def __init__(self) -> None:
        # In a session of its own, so that Ctrl-C in the terminal does not end the guardian.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dialoop_ops.stack.processes.guardian"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=without_tokens(os.environ),
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def watch(self, pid: int) -> None:
        """End the session that `pid` leads when the stack is gone."""
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Report that the process has ended, since another one may soon get its pid."""
        self._say(f"-{pid}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the guardian was killed: go on without it
            self._process.stdin.write(line.encode())


def leaders_from(lines: Iterable[str]) -> set[int]:
    """Read until the pipe breaks, and return the leaders that were not reported as ended."""
    leaders: set[int] = set()
    for line in lines:
        (leaders.add if line.startswith("+") else leaders.discard)(int(line[1:]))
    return leaders


def end(leaders: set[int], *, grace_s: float = _GRACE_S) -> None:
    """Send SIGTERM to every leader, wait, then kill what is left of their sessions."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while members(leaders) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill_members(leaders)


if __name__ == "__main__":
    end(leaders_from(sys.stdin))
