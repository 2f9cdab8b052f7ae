"""The stacks that run on this machine: who listens where, by the files they keep under runs/.

A stack holds a lock on runs/.<run>.lock, in which its pid stands, for as long as it lives; once all
its services are ready it also writes runs/<run>/stack.json.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import Unavailable
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

STACK_FILE = "stack.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A living stack; no addresses (gRPC, and REST where it is served) while it starts or stops."""

    run_dir: Path
    pid: int
    addresses: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, str] = field(default_factory=dict)


def find_stack(run_dir: Path) -> Stack | None:
    """The stack that serves a run's directory, or None."""
    pid = _holder_of(run_dir.parent / f".{run_dir.name}.lock")
    if not pid:
        return None
    return announced(run_dir, pid) or Stack(run_dir=run_dir, pid=pid)


def find_stacks(root: Path) -> list[Stack]:
    """All living stacks whose runs are under `root`."""
    names = (path.name.removeprefix(".").removesuffix(".lock") for path in root.glob(".*.lock"))
    found = (find_stack(root / name) for name in sorted(names))
    return [stack for stack in found if stack is not None]


def require_addresses(run_dir: Path) -> dict[str, str]:
    """Who listens where, by service name; Unavailable when no ready stack serves the run."""
    stack = find_stack(run_dir)
    if stack is None or not stack.addresses:
        raise Unavailable(
            f"No stack is serving {run_dir}." if stack is None else f"{run_dir} is starting.",
            reason=Reason.NO_STACK,
            remedy="Start one with `dialoop up`."
            if stack is None
            else "Wait until all of its services are ready.",
        )
    return dict(stack.addresses)


def _holder_of(lock: Path) -> int:
    """The pid of who holds the lock; 0 for nobody."""
    try:
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except (OSError, ValueError):
        return 0
    return 0


def announced(run_dir: Path, pid: int) -> Stack | None:
    """The stack of this pid once all its services are ready, by the file that it writes then."""
    try:
        found = json.loads((run_dir / STACK_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if found["pid"] != pid:  # a stack that was killed leaves its file behind
        return None
    addresses, rest = dict(found["addresses"]), dict(found.get("rest_addresses", {}))
    return Stack(run_dir=run_dir, pid=pid, addresses=addresses, rest=rest)
