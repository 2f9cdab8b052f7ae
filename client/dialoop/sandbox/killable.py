"""Trusted functions that may hang. Each call runs in a process that can be killed.

same = KillableFunction("my_folder.grading:same_answer", max_processes=2)
await same({"given": "1/2", "wanted": "0.5"}, timeout_s=5)      # True; later calls reuse imports
await run_killable("my_folder.grading:same_answer", answers, timeout_s=5)   # a process for one call

This is no sandbox: the function can read all that this process can. It does not use threads, since
Python cannot kill a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from dialoop.errors import DeadlineExceeded, InternalError, InvalidConfig, InvalidInput
from dialoop.reasons import Reason

_LOG = logging.getLogger(__name__)
_LENGTH = struct.Struct("!I")
_BOOT = "from dialoop.sandbox.killed import main; main()"


class KillableFunction:
    """An importable function, sync or async, called in up to `max_processes` reused processes.

    A call that takes too long ends its process, and the next call gets a new one. Callers wait for
    a free process. Use it on one event loop at a time.
    """

    def __init__(self, function: str, *, max_processes: int = 2) -> None:
        module, _, name = function.partition(":")
        if not module or not name or max_processes < 1:
            raise InvalidConfig(
                f"function is '{function}' and max_processes is {max_processes}.",
                remedy="Name the function as module:function, and use 1 or more processes.",
            )
        self._function, self._max_processes = function, max_processes
        self._idle: deque[_Process] = deque()
        self._places = asyncio.Semaphore(max_processes)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the function's result (JSON) for these keyword arguments (JSON).

        Raise DeadlineExceeded (FUNCTION_TIMEOUT) when it was killed after `timeout_s`, which
        includes the start of its process. Raise InternalError (FUNCTION_FAILED) when it raised or
        ended its process.
        """
        self._be_on_this_loop()
        request = json.dumps({"function": self._function, "arguments": dict(arguments)}).encode()
        if not timeout_s > 0:
            raise InvalidInput(f"timeout_s is {timeout_s}.", remedy="Use seconds above 0.")
        async with self._places:
            process = self._idle.pop() if self._idle else _Process()
            answer = None
            try:
                async with asyncio.timeout(timeout_s):
                    answer = json.loads(await process.exchange(request))
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self._function} was killed after {timeout_s:g} s.",
                    reason=Reason.FUNCTION_TIMEOUT,
                    remedy="Give it more time, or less to do.",
                ) from None
            except OSError as error:
                raise self._failure(f"its process ended ({error})") from error
            finally:
                if answer is None:  # also after a cancellation: the process is in an unknown state
                    process.stop()
            self._idle.append(process)
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().stop()

    def _failure(self, why: str) -> InternalError:
        error_id = uuid4().hex[:12]
        _LOG.error("%s failed, error_id %s: %s", self._function, error_id, why)
        return InternalError(
            f"{self._function} failed (error_id {error_id}).",
            reason=Reason.FUNCTION_FAILED,
            remedy="Look up the error_id in the log.",
        )

    def _be_on_this_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            while self._idle:
                self._idle.pop().stop()
            self._loop, self._places = loop, asyncio.Semaphore(self._max_processes)


async def run_killable(function: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Call `module:function` in its own process, with KillableFunction's results and errors."""
    once = KillableFunction(function, max_processes=1)
    try:
        return await once(arguments, timeout_s=timeout_s)
    finally:
        await once.close()


class _Process:
    """One process and the socket to it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # keep the function's prints out of the service's logs
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self.stop = weakref.finalize(self, _stop, self._channel, process)

    async def exchange(self, request: bytes) -> bytes:
        """Send a request and return the answer; OSError when the process ends instead."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, _LENGTH.pack(len(request)) + request)
        (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
        return await self._receive(length)

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = []
        while size:
            part = await loop.sock_recv(self._channel, min(size, 1 << 16))
            if not part:
                raise ConnectionError("it closed its channel")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _stop(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    with suppress(ProcessLookupError):
        # Kill the group, which includes processes that the function started.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
