"""Find the stacks that run on this machine, by the files they keep under runs/.

A stack locks runs/.<run>.lock, which contains its pid, until it ends. It also keeps
runs/<run>/stack.json, with what its processes do and, once all are ready, their addresses.

A stack in containers, or of another machine, has no such files: DIALOOP_SERVICES names its machine.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from dialoop.errors import PermissionDenied, Unavailable
from dialoop.reasons import Reason

STACK_FILE = "stack.json"
SCALE_FILE = "scale.json"
"""How many processes a stack shall have, as `dialoop scale` asked, and why it could not do so."""
SCALED = ("collector", "inference")
"""The services that `dialoop scale` grows and shrinks."""

SERVICES_VARIABLE = "DIALOOP_SERVICES"
"""Variable with the machine of a stack's services, as 127.0.0.1 for those of containers here."""
PORTS = MappingProxyType(
    {"environment": 7001, "inference": 7002, "replay": 7003, "scorer": 7004, "trainer": 7005}
)
"""Where containers, and a stack without a config, publish their services; REST is 1000 above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running stack. `addresses` (gRPC) and `rest` are empty while it starts or stops.

    pid: 0 for a stack of which DIALOOP_SERVICES names the machine, where no process is ours.

    console: host:port of its console; empty if it has none. processes: state, pid, num_restarts
    and alarm of each process, as its supervisor wrote them. owner: the user who wrote that.
    """

    run_dir: Path
    pid: int
    addresses: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    console: str = ""
    processes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    owner: int = field(default_factory=os.getuid)

    def require_own(self, token: str) -> None:
        """Raise PermissionDenied (FOREIGN_STACK) before a token goes where another user says.

        Whoever can write a run's folder can name any address there.
        """
        if token and self.owner not in (os.getuid(), 0):
            raise PermissionDenied(
                f"User {self.owner} has written {self.run_dir / STACK_FILE}, and a token would go "
                "to the addresses that it names.",
                reason=Reason.FOREIGN_STACK,
                remedy="Unset DIALOOP_TOKEN, or name the services' addresses yourself.",
            )


def find_stack(run_dir: Path) -> Stack | None:
    """Return the stack that serves a run's directory, or None."""
    pid = _holder_of(run_dir.parent / f".{run_dir.name}.lock")
    if not pid:
        return None
    return read_announcement(run_dir, pid) or Stack(run_dir=run_dir, pid=pid)


def find_stacks(root: Path) -> list[Stack]:
    """Return all running stacks whose runs are under `root`."""
    names = (path.name.removeprefix(".").removesuffix(".lock") for path in root.glob(".*.lock"))
    stacks = (find_stack(root / name) for name in sorted(names))
    return [stack for stack in stacks if stack is not None]


def named_stack(run_dir: Path) -> Stack | None:
    """Return the stack on the machine that DIALOOP_SERVICES names; None where it is not set."""
    host = os.environ.get(SERVICES_VARIABLE, "")
    if not host:
        return None
    return Stack(
        run_dir=run_dir,
        pid=0,
        addresses={name: f"{host}:{port}" for name, port in PORTS.items()},
        rest={name: f"{host}:{port + 1000}" for name, port in PORTS.items()},
        run_id=run_dir.name,  # containers name their run by the job file
    )


def require_addresses(run_dir: Path, *, token: str = "") -> dict[str, str]:
    """Return each service's address by name; Unavailable when no ready stack serves the run.

    With a token for them, or DIALOOP_TOKEN, raise PermissionDenied (FOREIGN_STACK) for a stack of
    another user.
    """
    stack = find_stack(run_dir) or named_stack(run_dir)
    if stack is None or not stack.addresses:
        raise Unavailable(
            f"No stack is serving {run_dir}." if stack is None else f"{run_dir} is starting.",
            reason=Reason.NO_STACK,
            remedy="Start one with `dialoop up`."
            if stack is None
            else "Wait until all of its services are ready.",
        )
    stack.require_own(token or os.environ.get("DIALOOP_TOKEN", ""))
    return dict(stack.addresses)


def _holder_of(lock: Path) -> int:
    """Return the pid of the process that holds the lock; 0 if none does."""
    try:
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except (OSError, ValueError):
        return 0
    return 0


def read_announcement(run_dir: Path, pid: int) -> Stack | None:
    """Return the stack of this pid from its stack.json, or None where it has written none."""
    try:
        with (run_dir / STACK_FILE).open(encoding="utf-8") as file:
            content, owner = json.load(file), os.fstat(file.fileno()).st_uid
    except (OSError, ValueError):
        return None
    if content["pid"] != pid:  # a stack that was killed leaves its file behind
        return None
    addresses, rest = dict(content["addresses"]), dict(content.get("rest_addresses", {}))
    return Stack(
        run_dir=run_dir,
        pid=pid,
        addresses=addresses,
        rest=rest,
        run_id=str(content.get("run_id", "")),
        console=str(content.get("console", "")),
        processes=dict(content.get("processes", {})),
        owner=owner,
    )
