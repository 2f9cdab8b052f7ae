"""Free loopback ports, chosen before anything starts, so that every service knows every address."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

HOST = "127.0.0.1"

# Below those that Linux and others hand out by themselves (32768 and up): nobody who asks for any
# port, or connects somewhere, is given one of ours between the choice and a service's start.
_FREE = range(20_000, 32_000)
_NUM_TRIES = 200
# Locks on what this process has chosen, until it ends: another stack of the same user that starts
# before our services listen chooses others.
_reserved: list[int] = []


def choose_ports(wanted: dict[str, int]) -> dict[str, int]:
    """Give each name its wanted port, or a free one for 0; InvalidConfig when a port is taken.

    choose_ports({"replay": 7003, "trainer": 0})   # {"replay": 7003, "trainer": 24123}
    """
    probes: list[socket.socket] = []
    try:
        ports: dict[str, int] = {}
        # Fixed ones first, and all held until the last is chosen: no free one may collide.
        for name, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            probes.append(_bound(name, port) if port else _any(name))
            ports[name] = probes[-1].getsockname()[1]
        return {name: ports[name] for name in wanted}
    finally:
        for probe in probes:
            probe.close()


def _any(name: str) -> socket.socket:
    """One of the free ports, reserved among the stacks of this user."""
    for port in random.SystemRandom().sample(_FREE, _NUM_TRIES):
        if _reserve(port):
            try:
                return _bound(name, port)
            except InvalidConfig:
                continue
    raise InvalidConfig(
        f"None of {_NUM_TRIES} ports between {_FREE.start} and {_FREE.stop} is free for {name}.",
        reason=Reason.PORT_TAKEN,
        remedy=f"Set ports.{name} to a free port, or end stacks that are not needed.",
    )


def _reserve(port: int) -> bool:
    """Whether no other process of this user has chosen it; the kernel ends our lock with us."""
    folder = Path(tempfile.gettempdir()) / f"dialoop-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = os.open(folder / str(port), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _reserved.append(file)
    return True


def _bound(name: str, port: int) -> socket.socket:
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As the servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((HOST, port))
        # Listening marks it as taken for the next probe of ours, in spite of SO_REUSEADDR.
        probe.listen(1)
    except OSError as error:
        probe.close()
        raise InvalidConfig(
            f"Port {port} of {name} is taken.",
            reason=Reason.PORT_TAKEN,
            remedy=f"Set ports.{name} to another port, or to 0 for any free one.",
        ) from error
    return probe
