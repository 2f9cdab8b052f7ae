"""The fork server: a small process without secrets that starts, ends and reaps interpreters.

It and the service talk over one SOCK_SEQPACKET socket, with one JSON object per packet:

    {"spawn": 7, "rules": {...}, "program": null | [...]} with three descriptors: channel, out, err
    {"kill": 7}
    {"ended": 7, "status": 9}      from here, when the process has ended
    {"error": "...", "id": 7}      from here, when it could not be started

When the socket closes, because the service has ended in any way, it kills all interpreters.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

from .interpreter import CHANNEL
from .libc import PR_SET_PDEATHSIG, prctl
from .work import work


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Loaded once and shared by all interpreters; at level `rlimits` code can import nothing else.
_PRELOADED = _words(
    """
    abc argparse array ast asyncio base64 binascii bisect bz2 cProfile calendar cmath codecs
    collections collections.abc concurrent.futures contextlib contextvars copy copyreg csv
    ctypes dataclasses datetime decimal difflib dis doctest enum errno fnmatch fractions
    functools gc getopt glob graphlib hashlib heapq hmac html importlib.machinery inspect io
    itertools json keyword linecache locale math mmap numbers opcode operator os.path pathlib
    pickle platform posixpath pprint pstats queue random re reprlib resource sched secrets
    select selectors shlex shutil signal socket stat statistics string struct sys tempfile
    textwrap threading time timeit token tokenize traceback types typing unicodedata unittest
    urllib.parse uuid warnings weakref zlib zoneinfo
    """
)
_MAX_PACKET = 1 << 16


class _Server:
    """The interpreters by process id, and the loop that serves the service's orders."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ids: dict[int, int] = {}

    def run(self) -> None:
        """Serve orders until the service closes its end."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watched = select.poll()
        watched.register(self._control, select.POLLIN)
        watched.register(woken, select.POLLIN)
        while True:
            ready = dict(watched.poll())
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._obey():
                return

    def kill_all(self) -> None:
        """End every interpreter."""
        for pid in self._ids:
            _kill(pid)

    def _obey(self) -> bool:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, _MAX_PACKET, 3)
        except ConnectionError:
            return False
        if not packet:
            return False
        order = json.loads(packet)
        if "kill" in order:
            for pid in [pid for pid, number in self._ids.items() if number == order["kill"]]:
                _kill(pid)
            return True
        self._spawn(order, fds)
        for fd in fds:
            os.close(fd)
        return True

    def _spawn(self, order: dict[str, Any], fds: list[int]) -> None:
        # Read before the fork: if this process ended, the child's getppid() would be another id.
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report({"error": str(error), "id": order["spawn"]})
            return
        if pid == 0:
            _become(order, fds, server)
        self._ids[pid] = order["spawn"]

    def _reap(self) -> None:
        while self._ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._report({"ended": self._ids.pop(pid), "status": status})

    def _report(self, report: dict[str, Any]) -> None:
        with suppress(OSError):  # the service is gone, and the closed socket ends the loop
            self._control.send(json.dumps(report).encode())


def _kill(pid: int) -> None:
    # A child that was just forked has no group of its own yet, so kill both.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become(order: dict[str, Any], fds: list[int], server: int) -> NoReturn:
    """Run the child: arrange its descriptors, then execute a program or work; never return."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _arrange(fds)
        if os.getppid() == server:
            if order["program"]:
                os.execv(order["program"][0], order["program"])
            work(order["rules"])
            status = 0
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _arrange(fds: list[int]) -> None:
    """Set an empty input as 0, outputs and channel as 1, 2 and 3, and close all else."""
    channel, out, err = (os.dup(fd) for fd in fds)
    # A pipe of its own and not /dev/null: with a descriptor, code could change the device's mode.
    nowhere, _ = os.pipe()
    # All copies are above 3: the control socket and the wakeup pipe were opened before.
    for source, target in ((nowhere, 0), (out, 1), (err, 2), (channel, CHANNEL)):
        os.dup2(source, target, inheritable=True)
    os.closerange(CHANNEL + 1, 1 << 16)


def main(control_fd: int) -> None:
    """Run the fork server until the service closes the control socket."""
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server = _Server(socket.socket(fileno=control_fd))
    try:
        server.run()
    finally:
        server.kill_all()
