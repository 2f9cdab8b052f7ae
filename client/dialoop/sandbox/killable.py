"""Trusted functions that may hang. Each call runs in a process that can be killed.

same = KillableFunction("my_folder.grading:same_answer", max_processes=2)
await same({"given": "1/2", "wanted": "0.5"}, timeout_s=5)      # True; later calls reuse imports
await run_killable("my_folder.grading:same_answer", answers, timeout_s=5)   # a process for one call

This is no sandbox: the function can read all that this process can. It does not use threads, since
Python cannot kill a thread. `LimitedFunction` is for trusted functions of untrusted input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from dialoop.errors import DeadlineExceeded, InternalError, InvalidConfig, InvalidInput
from dialoop.reasons import Reason

_LOG = logging.getLogger(__name__)
_LENGTH = struct.Struct("!I")
_END_S = 2.0
_START_S = 60.0
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
                raise failure_of(self._function, f"its process ended ({error})") from error
            finally:
                if answer is None:  # also after a cancellation: the process is in an unknown state
                    process.stop()
            self._idle.append(process)
        if "error" in answer:
            raise failure_of(self._function, answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().stop()

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


class LimitExceeded(Exception):
    """A call of a LimitedFunction took more time or memory than it may; `what` says which."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class LimitedFunction:
    """An importable sync function for input that nobody trusts, called from threads.

    Each call runs in one of up to `max_processes` reused processes, without this process's
    environment variables and with at most `max_memory_bytes` above what the import took. A call
    blocks its thread; never call it on an event loop.
    """

    def __init__(self, function: str, *, max_memory_bytes: int, max_processes: int = 2) -> None:
        self._function, self._max_memory = function, max_memory_bytes
        self._idle: deque[_Process] = deque()
        self._places = threading.BoundedSemaphore(max_processes)

    def __call__(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the function's result (JSON) for these keyword arguments (JSON).

        timeout_s: seconds for the call; the start of a process is not counted. Raise LimitExceeded
        where time or memory ran out, and InternalError (FUNCTION_FAILED) where the function raised.
        """
        request = json.dumps({"function": self._function, "arguments": dict(arguments)}).encode()
        with self._places:
            process = self._process()
            answer = None
            try:
                answer = json.loads(process.exchange_blocking(request, timeout_s))
            except TimeoutError:
                raise LimitExceeded(f"{timeout_s:g} s") from None
            except OSError:  # the system killed it, or it could not even report its failure
                raise LimitExceeded(f"{self._max_memory >> 20} MiB of memory") from None
            finally:
                if answer is None or "error" in answer:
                    process.stop()  # what a failed call left behind is unknown
                else:
                    self._idle.append(process)
        if answer.get("is_out_of_memory"):
            raise LimitExceeded(f"{self._max_memory >> 20} MiB of memory")
        if "error" in answer:
            raise failure_of(self._function, answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().stop()

    def _process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.stop()
        return self._start()

    def _start(self) -> _Process:
        process = _Process(max_memory_bytes=self._max_memory)
        request = json.dumps({"load": self._function}).encode()
        try:
            answer = json.loads(process.exchange_blocking(request, _START_S))
        except OSError as error:
            process.stop()
            raise failure_of(self._function, f"its process did not start ({error!r})") from error
        if "error" in answer:
            process.stop()
            raise failure_of(self._function, answer["error"])
        return process


def failure_of(function: str, why: str) -> InternalError:
    """Log why a function failed, under the error_id of the error that is returned."""
    error_id = uuid4().hex[:12]
    _LOG.error("%s failed, error_id %s: %s", function, error_id, why)
    return InternalError(
        f"{function} failed (error_id {error_id}).",
        reason=Reason.FUNCTION_FAILED,
        remedy="Look up the error_id in the log.",
    )


class _Process:
    """One process and the socket to it.

    max_memory_bytes: what it may take above its imports; None means no limit, and a copy of this
    process's environment variables.
    """

    def __init__(self, max_memory_bytes: int | None = None) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        is_limited = max_memory_bytes is not None
        inherited = {} if is_limited else os.environ
        limit = [str(max_memory_bytes)] if is_limited else []
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path), *limit],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # keep the function's prints out of the service's logs
                stderr=subprocess.DEVNULL if is_limited else None,
                pass_fds=(theirs.fileno(),),
                env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self._process = process
        self.stop = weakref.finalize(self, _stop, self._channel, process)

    @property
    def is_alive(self) -> bool:
        """Return whether it has not ended by itself, or been killed by the system."""
        return self._process.poll() is None

    def exchange_blocking(self, request: bytes, timeout_s: float) -> bytes:
        """Do as `exchange` for a thread; TimeoutError after `timeout_s` in all."""
        end = time.monotonic() + timeout_s
        self._wait_until(end)
        self._channel.sendall(_LENGTH.pack(len(request)) + request)
        (length,) = _LENGTH.unpack(self._receive_blocking(_LENGTH.size, end))
        return self._receive_blocking(length, end)

    def _receive_blocking(self, size: int, end: float) -> bytes:
        parts = []
        while size:
            self._wait_until(end)
            part = self._channel.recv(min(size, 1 << 16))
            if not part:
                raise ConnectionError("it closed its channel")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)

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
    patience = None
    try:
        # Kill the group, which includes processes that the function started.
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # this process has given up its rights since
        patience = _END_S  # the other one ends with its channel
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
