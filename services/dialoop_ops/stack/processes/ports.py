"""Choose free local ports before anything starts, so that each service knows all addresses."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

HOST = "127.0.0.1"

# Below the ports that Linux and others assign by themselves (32768 and up). So no other program
# gets one of these between the choice and a service's start by asking for any port.
_FREE = range(20_000, 32_000)
_NUM_TRIES = 200
# Locks on the ports chosen by this process, kept until it ends. Another stack of the same user that
# starts before our services listen chooses other ports.
_reserved: list[int] = []


def choose_ports(wanted: dict[str, int]) -> dict[str, int]:
    """Return each name's wanted port, or a free one for 0; InvalidConfig when a port is taken.

    choose_ports({"replay": 7083, "trainer": 0}) # {"replay": 7083, "trainer": 24123}, say
    """
    probes: list[socket.socket] = []
    try:
        ports: dict[str, int] = {}
        # Fixed ports come first, and all are held until the last is chosen, so that none collide.
        for name, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            probes.append(_bind(name, port) if port else _bind_any(name))
            ports[name] = probes[-1].getsockname()[1]
        return {name: ports[name] for name in wanted}
    finally:
        for probe in probes:
            probe.close()


def _bind_any(name: str) -> socket.socket:
    """Bind a free port that no other stack of this user has reserved."""
    for port in random.SystemRandom().sample(_FREE, _NUM_TRIES):
        if _reserve(port):
            try:
                return _bind(name, port)
            except InvalidConfig:
                continue
    raise InvalidConfig(
        f"None of {_NUM_TRIES} ports between {_FREE.start} and {_FREE.stop} is free for {name}.",
        reason=Reason.PORT_TAKEN,
        remedy=f"Set ports.{name} to a free port, or stop stacks that you do not need.",
    )


def private_folder(within: Path | None = None) -> Path:
    """Return this user's folder of locks among the machine's temporary files.

    InvalidConfig (LOCKS_OF_OTHERS) where somebody else made it, who could hold every lock in it.
    """
    folder = (within or Path(tempfile.gettempdir())) / f"dialoop-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return folder
    raise InvalidConfig(
        f"{folder} is not a folder of this user alone.",
        reason=Reason.LOCKS_OF_OTHERS,
        remedy="Remove it, or set TMPDIR to a folder of your own.",
    )


def _reserve(port: int) -> bool:
    """Lock the port's file until this process ends; return false if another process has it."""
    file = os.open(private_folder() / f"port-{port}", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _reserved.append(file)
    return True


def _bind(name: str, port: int) -> socket.socket:
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As the servers do: a port in TIME_WAIT is free, and one that a process listens on is not.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((HOST, port))
        # Listening makes the port taken for the next probe, in spite of SO_REUSEADDR.
        probe.listen(1)
    except OSError as error:
        probe.close()
        raise InvalidConfig(
            f"Port {port} of {name} is taken.",
            reason=Reason.PORT_TAKEN,
            remedy=f"Set ports.{name} to another port, or to 0 for any free one.",
        ) from error
    return probe
