"""`python -m dialoop_services.trainer.learner.launch 4`: four trainer processes here.

The processes end together. On a signal to stop, the first one finishes its step and saves. When one
process is lost, this one ends the others and exits non-zero, so that its caller can restart it.
torchrun does the same over several machines, and every process there can reach its store. Here the
ranks meet in a file that only this user can read, and connect over the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dialoop_services.runtime.process import PARENT_VARIABLE, die_with_parent

_POLL_S = 0.1
_LAST_WORDS_S = 5.0
_CONFIG_ERROR = 2
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Launch:
    """The processes of one launch, from start to end.

    When one is lost, the others have `last_words_s` seconds to notice it and log their error.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        folder: Path,
        *,
        last_words_s: float = _LAST_WORDS_S,
    ) -> None:
        self._last_words_s = last_words_s
        self._command = tuple(command)
        self._folder = folder
        self._is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            self._ranks.append(self._start(rank, num_ranks))

    def wait(self) -> int:
        """Wait until one has ended, end the others, and return the exit code of the launch."""
        has_forwarded_stop = False
        while all(rank.poll() is None for rank in self._ranks):
            if self._is_stopping and not has_forwarded_stop:
                self._ranks[0].terminate()
                has_forwarded_stop = True
            time.sleep(_POLL_S)
        lost = [number for number, rank in enumerate(self._ranks) if rank.poll()]
        self._end_the_others()
        codes = [rank.returncode for rank in self._ranks]
        if self._is_stopping and codes[0] in (0, -signal.SIGTERM):
            return 0
        for number in lost:
            if codes[number] < 0:
                self._report(f"Rank {number} was ended by signal {-codes[number]}.")
        if _CONFIG_ERROR in codes:
            return _CONFIG_ERROR
        return 1 if any(codes) else 0

    def _start(self, rank: int, size: int) -> subprocess.Popen[bytes]:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "DIALOOP_RENDEZVOUS": f"file://{self._folder / 'store'}",
            # What is set stays: NCCL reaches a replica on another machine by that interface too.
            **{name: os.environ.get(name, _LOOPBACK) for name in _INTERFACES},
            PARENT_VARIABLE: str(os.getpid()),
        }
        return subprocess.Popen(self._command, env=os.environ | variables)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True

    def _end_the_others(self) -> None:
        """Kill ranks that do not end in time; only the first one saves, before it exits."""
        deadline = time.monotonic() + self._last_words_s
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def _report(self, what: str) -> None:
        sys.stderr.write(
            f"dialoop trainer: {what} The others were ended with it. "
            "Resume all ranks from the last checkpoint.\n"
        )


def main() -> None:
    """Run as many processes as the first argument says."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("num_processes", type=int)
    num_processes = parser.parse_args().num_processes
    die_with_parent()
    command = (sys.executable, "-m", "dialoop_services.trainer")
    with tempfile.TemporaryDirectory(prefix="dialoop-ranks-") as folder:
        code = Launch(command, num_processes, Path(folder)).wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
