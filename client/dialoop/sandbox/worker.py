"""The service's side of one confined interpreter: a channel, two output files, a way to kill it.

Outputs are memory files and not pipes. The service reads each at most up to the limit, so much
output costs it nothing, and it can read what the code printed before a timeout.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import struct
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dialoop.errors import Unavailable
from dialoop.reasons import Reason
from dialoop.sandbox.confined.interpreter import ASKED, FAILED, NONCE_BYTES, SUCCEEDED
from dialoop.sandbox.execution import Execution
from dialoop.sandbox.forkserver import ForkServer

_LENGTH = struct.Struct("!I")
_ANSWER_BYTES = _LENGTH.size + NONCE_BYTES + 1
_READY_NONCE = bytes(NONCE_BYTES)
_START_S = 20.0
_END_S = 5.0
# How long to wait for the exit status: after the channel closed, and after a wrong answer.
_GONE_END_S, _OWN_END_S = 2.0, 0.05
_GONE = "The interpreter has closed its channel."


MAX_QUESTION_BYTES = 1 << 20
"""Longest question of trusted code while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """How trusted code asks while it runs: frames of the nonce, `ASKED` and the question."""

    nonce: bytes
    answer: Callable[[bytes], Awaitable[bytes]]


class BrokenChannel(Exception):
    """The interpreter is gone, or it sent something that is not the answer to the request."""


class Worker:
    """An interpreter that is ready. It runs one `execute` at a time; `start_worker` makes one."""

    def __init__(self, server: ForkServer, max_output_bytes: int) -> None:
        self._server = server
        self._max_output_bytes = max_output_bytes
        self._channel, self._theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._outputs = (_memory_file("stdout"), _memory_file("stderr"))
        self._number = 0
        self._ended: asyncio.Future[int] | None = None
        self._release = weakref.finalize(self, _release, self._channel, self._outputs)

    async def start(self, rules: dict[str, Any], program: list[str] | None) -> None:
        """Start it and wait until it is confined and ready."""
        try:
            with self._theirs:
                fds = (self._theirs.fileno(), *self._outputs)
                self._number, self._ended = await self._server.spawn(rules, program, fds)
            # Only from here on, since an object that never started has no process to kill.
            self._kill = weakref.finalize(self, self._server.kill, self._number)
            async with asyncio.timeout(_START_S):
                await self._answer(_READY_NONCE)
        except (BrokenChannel, TimeoutError) as error:
            why = self._read(1)[0].strip() or f"no answer in {_START_S:g} s"
            await self.close()
            failure = Unavailable(
                "An interpreter of the sandbox did not start; the log says why.",
                reason=Reason.SANDBOX_FAILED,
                remedy="Look at the service's log; free memory or processes, then try again.",
            )
            failure.add_note(why)  # for the log; a client gets only the message
            raise failure from error
        except BaseException:
            await self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Return whether it can run code."""
        return self._release.alive and self._ended is not None and not self._ended.done()

    async def execute(
        self, code: str, timeout_s: float, questions: Questions | None = None
    ) -> Execution:
        """Run the code; kill the interpreter if the code timed out or broke the channel.

        questions: what answers the code while it runs; only for code that the caller trusts.
        """
        started = time.perf_counter()
        status, why, timed_out = FAILED, "", False
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._exchange(code, questions)
        except TimeoutError:
            why, timed_out = f"Timed out after {timeout_s:g} s.", True
        except BrokenChannel as error:
            why = await self._how_it_ended(str(error))
        except BaseException:  # cancelled: nobody needs the interpreter any more
            await self.close()
            raise
        if why:
            await self._end()
        (out, out_is_cut), (err, err_is_cut) = self._read(0), self._read(1)
        if why:
            err = f"{err}\n{why}\n" if err and not err.endswith("\n") else f"{err}{why}\n"
            await self.close()
        return Execution(
            stdout=out,
            stderr=err,
            succeeded=status == SUCCEEDED and not why,
            duration_s=time.perf_counter() - started,
            timed_out=timed_out,
            truncated=out_is_cut or err_is_cut,
            ended=bool(why),
        )

    async def close(self) -> None:
        """Kill it, wait until it is gone, and free its files; further calls do nothing."""
        if self._release.alive:
            try:
                await self._end()
            finally:
                self._release()

    async def _end(self) -> None:
        if self._ended is None:
            return
        if not self._ended.done():
            self._server.kill(self._number)
            # `wait` does not cancel the fork server's future. The time-out is for processes in an
            # uninterruptible system call, which end late.
            await asyncio.wait([self._ended], timeout=_END_S)
        self._kill.detach()

    async def _exchange(self, code: str, questions: Questions | None) -> int:
        """Send the code and return the answer's status; BrokenChannel for anything else."""
        loop = asyncio.get_running_loop()
        for fd in self._outputs:
            os.ftruncate(fd, 0)
        if self._has_unasked_bytes():
            raise BrokenChannel("Earlier code wrote to the interpreter's channel.")
        nonce = questions.nonce if questions else secrets.token_bytes(NONCE_BYTES)
        await self._send(loop, nonce + code.encode("utf-8", "replace"))
        return await self._answer(nonce, questions)

    async def _send(self, loop: asyncio.AbstractEventLoop, content: bytes) -> None:
        try:
            await loop.sock_sendall(self._channel, _LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise BrokenChannel(_GONE) from error

    async def _receive(self, loop: asyncio.AbstractEventLoop, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = await loop.sock_recv(self._channel, min(size, 1 << 16))
            except OSError as error:
                raise BrokenChannel(_GONE) from error
            if not part:
                raise BrokenChannel(_GONE)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def _answer(self, nonce: bytes, questions: Questions | None = None) -> int:
        loop = asyncio.get_running_loop()
        while True:
            answer = await self._receive(loop, _ANSWER_BYTES)
            head, status = answer[:-1], answer[-1]
            if questions is None or status != ASKED or head[_LENGTH.size :] != nonce:
                break
            size = _LENGTH.unpack(head[: _LENGTH.size])[0] - NONCE_BYTES - 1
            if not 0 <= size <= MAX_QUESTION_BYTES:
                break
            await self._send(loop, await questions.answer(await self._receive(loop, size)))
        if head != _LENGTH.pack(NONCE_BYTES + 1) + nonce or status not in (FAILED, SUCCEEDED):
            raise BrokenChannel("The code wrote to the interpreter's channel.")
        return status

    def _has_unasked_bytes(self) -> bool:
        try:
            return bool(self._channel.recv(1))
        except BlockingIOError:
            return False
        except OSError as error:
            raise BrokenChannel(_GONE) from error

    async def _how_it_ended(self, why: str) -> str:
        """Return `why`, or the signal or status with which the interpreter ended by itself.

        Raise Unavailable (SANDBOX_FAILED) when the code did not cause it.
        """
        if self._ended is None:
            return why
        timeout_s = _GONE_END_S if why == _GONE else _OWN_END_S
        await asyncio.wait([self._ended], timeout=timeout_s)
        if not self._ended.done():
            return why
        if self._ended.result() < 0:
            await self.close()
            raise Unavailable(
                "The sandbox's fork server ended while code was running.",
                reason=Reason.SANDBOX_FAILED,
                remedy="Try again: the next call starts another.",
            )
        code = os.waitstatus_to_exitcode(self._ended.result())
        # bwrap adds 128 to the signal that ended its child, as a shell does.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number == 0:
            return f"The interpreter exited with status {code}."
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        limits = " (a limit on memory or processor time)" if number == signal.SIGKILL else ""
        return f"The interpreter was killed by {name}{limits}."

    def _read(self, index: int) -> tuple[str, bool]:
        """Return the output, and whether some of it was cut off."""
        fd, limit = self._outputs[index], self._max_output_bytes
        text = os.pread(fd, limit, 0).decode("utf-8", "replace")
        return text, os.fstat(fd).st_size > limit


async def start_worker(
    server: ForkServer, rules: dict[str, Any], program: list[str] | None
) -> Worker:
    """Start an interpreter and return it ready; Unavailable (SANDBOX_FAILED) if that fails."""
    worker = Worker(server, rules["max_output_bytes"])
    await worker.start(rules, program)
    return worker


def _memory_file(name: str) -> int:
    fd = os.memfd_create(name)
    # With O_APPEND the writer starts again at 0 after the file is emptied between two calls.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _release(channel: socket.socket, outputs: tuple[int, ...]) -> None:
    channel.close()
    for fd in outputs:
        os.close(fd)
