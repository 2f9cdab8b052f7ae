"""The service's side of the fork server: start it, and let it start and kill interpreters."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import subprocess
import weakref
from contextlib import suppress
from typing import Any

from dialoop.errors import Unavailable
from dialoop.reasons import Reason
from dialoop.sandbox.programs import forkserver_program

_LOG = logging.getLogger(__name__)
_MAX_PACKET = 1 << 16
_STOP_S = 2.0


class ForkServer:
    """One process that forks interpreters. It belongs to the event loop that it was made on.

    The process and all its interpreters end when this object is deleted or this process ends.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                forkserver_program(theirs.fileno()),
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        self._ids = itertools.count(1)
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._stop = weakref.finalize(self, _stop, self.loop, ours, process)
        self.pid = process.pid
        # A strong reference in the reader would keep this object and the process alive.
        self.loop.add_reader(ours, _read_weakly, weakref.ref(self))

    @property
    def is_alive(self) -> bool:
        """Return whether it can start interpreters."""
        return self._stop.alive and not self.loop.is_closed()

    async def spawn(
        self, rules: dict[str, Any], program: list[str] | None, fds: tuple[int, int, int]
    ) -> tuple[int, asyncio.Future[int]]:
        """Start an interpreter on (channel, stdout, stderr); return its id and a future of its end.

        The future's value is the status from waitpid, or -1 if it is unknown. Raise Unavailable
        (SANDBOX_FAILED) when the fork server is gone.
        """
        number, ended = next(self._ids), self.loop.create_future()
        packet = json.dumps({"spawn": number, "rules": rules, "program": program}).encode()
        self._ended[number] = ended
        try:
            await self._send(packet, list(fds))
        except BaseException:
            self._ended.pop(number, None)
            raise
        return number, ended

    def kill(self, number: int) -> None:
        """Kill an interpreter; callable on any thread at any time."""
        with suppress(OSError):  # it has ended; or it is busy, and then closing the socket kills
            self._control.send(json.dumps({"kill": number}).encode())

    def close(self) -> None:
        """End the fork server and all its interpreters."""
        self._stop()
        for future in self._ended.values():
            if not future.done() and not self.loop.is_closed():
                future.set_result(-1)
        self._ended.clear()

    async def _send(self, packet: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._control, [packet], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self.close()
                raise Unavailable(
                    "The sandbox's fork server is gone.",
                    reason=Reason.SANDBOX_FAILED,
                    remedy="Try again: the next call starts another.",
                ) from error

    def read_reports(self) -> None:
        """Read the fork server's reports; the event loop calls it when there are some."""
        while True:
            try:
                packet = self._control.recv(_MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                _LOG.warning("the sandbox's fork server has ended")
                self.close()
                return
            self._handle(json.loads(packet))

    def _handle(self, report: dict[str, Any]) -> None:
        if "error" in report:
            _LOG.error("the sandbox's fork server cannot fork: %s", report["error"])
        future = self._ended.pop(report.get("ended", report.get("id", 0)), None)
        if future is not None and not future.done():
            future.set_result(report.get("status", -1))


def _read_weakly(server: weakref.ref[ForkServer]) -> None:
    alive = server()
    if alive is not None:
        alive.read_reports()


def _stop(
    loop: asyncio.AbstractEventLoop, control: socket.socket, process: subprocess.Popen[bytes]
) -> None:
    if not loop.is_closed():
        loop.remove_reader(control)
    control.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
