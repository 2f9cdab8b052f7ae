"""Find, kill and measure processes of this machine: sessions, descendants and their CPU time."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

_PR_SET_CHILD_SUBREAPER = 36


def members(leaders: Collection[int]) -> list[int]:
    """Return the pids in the sessions or groups that `leaders` lead, without zombies."""
    return [pid for pid in psutil.pids() if _is_member(pid, leaders)]


def _is_member(pid: int, leaders: Collection[int]) -> bool:
    with suppress(OSError, psutil.Error):
        if os.getsid(pid) in leaders or os.getpgid(pid) in leaders:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def descendants(ancestor: int) -> list[int]:
    """Return the pids of the children of a process, their children, and so on."""
    return [child.pid for child in psutil.Process(ancestor).children(recursive=True)]


def kill_members(leaders: Collection[int]) -> None:
    """Send SIGKILL to the groups of `leaders` and to all that is left in their sessions."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    kill(members(leaders))


def kill(pids: Collection[int]) -> None:
    """Send SIGKILL to each process; skip those that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that all of them can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def total_cpu_s() -> float:
    """Return the CPU seconds of this process, its finished children and its living descendants."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            used = process.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total
