"""The CPU cores of this process, and who goes first where several want them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_NICENESS = 15
"""A thread of it gets a thirtieth of what one gets that goes first."""


def threads_of(num_threads: int, *, num_processes: int = 1) -> int:
    """Return how many threads to compute with; 0 stands for one on each core.

    Of several processes each gets its share of the physical cores that this one may use.
    """
    if num_threads:
        return num_threads
    num_allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_cores = min(num_allowed, psutil.cpu_count(logical=False) or num_allowed)
    return max(1, num_cores // num_processes)


def let_others_go_first() -> None:
    """Leave the cores to processes that want them, as long as they do.

    For this thread and those that it starts. An engine and a trainer that take turns this way lose
    no time: while both compute with a thread on each core, each thread waits for its siblings.
    """
    os.nice(_NICENESS)
    # Linux weighs sessions before threads: without this the niceness counts in this session alone.
    # A session of somebody else, such as a terminal's, would keep it when this process has ended.
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # where it does not
            Path("/proc/self/autogroup").write_text(str(_NICENESS), "utf-8")
