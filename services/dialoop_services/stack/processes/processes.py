"""What runs on this machine, read from /proc: sessions, descendants and the CPU they used."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One running process; `cpu_s` includes the children it has waited for."""

    pid: int
    parent: int
    group: int
    session: int
    cpu_s: float


def running() -> Iterator[ProcessInfo]:
    """Every process but the zombies; nothing where there is no /proc."""
    for directory in _PROC.glob("[0-9]*"):
        info = _read(directory)
        if info is not None:
            yield info


def _read(directory: Path) -> ProcessInfo | None:
    try:
        line = (directory / "stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    fields = line.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    parent, group, session = (int(field) for field in fields[1:4])
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessInfo(
        pid=int(directory.name),
        parent=parent,
        group=group,
        session=session,
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
    )


def members(leaders: Collection[int]) -> list[ProcessInfo]:
    """The processes in the sessions or groups that `leaders` lead."""
    return [p for p in running() if p.session in leaders or p.group in leaders]


def descendants(ancestor: int) -> list[ProcessInfo]:
    """The children of a process, their children, and so on."""
    by_parent: dict[int, list[ProcessInfo]] = {}
    for process in running():
        by_parent.setdefault(process.parent, []).append(process)
    found: list[ProcessInfo] = []
    pending = [ancestor]
    while pending:
        children = by_parent.get(pending.pop(), [])
        found.extend(children)
        pending.extend(child.pid for child in children)
    return found


def kill_members(leaders: Collection[int]) -> None:
    """SIGKILL the groups of `leaders` and whatever else is left in their sessions."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    kill([process.pid for process in members(leaders)])


def kill(pids: Collection[int]) -> None:
    """SIGKILL each process; those that are gone already do not matter."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that none is out of sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def total_cpu_s() -> float:
    """CPU seconds of this process, its finished children and its living descendants."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = sum(usage.ru_utime + usage.ru_stime for usage in (own, finished))
    return ended + sum(process.cpu_s for process in descendants(os.getpid()))
