"""An interpreter that keeps what earlier code defined. Each session has its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from dialoop.errors import InvalidInput
from dialoop.sandbox.execution import Execution
from dialoop.sandbox.limits import Limits
from dialoop.sandbox.pool import Pool
from dialoop.sandbox.worker import Worker


@dataclass(slots=True)
class _Held:
    """The pool and worker of an interpreter while it has a process."""

    pool: Pool | None = None
    worker: Worker | None = None


class PersistentInterpreter:
    """Runs code in one process, one piece at a time. The state is lost if the process ends.

    The process ends when the last reference is dropped.
    """

    def __init__(self, pool: Callable[[], Pool], limits: Limits) -> None:
        self._pool, self._limits = pool, limits
        self._held = _Held()
        self._turn = asyncio.Lock()
        weakref.finalize(self, _let_go, self._held)

    async def run(self, code: str, *, timeout_s: float = 10.0) -> Execution:
        """Run code in the state that earlier code left.

        After a timeout or a crash `ended` is true, `stderr` says that the state is lost, and the
        next call starts a fresh process. The errors are those of `Sandbox.run`.
        """
        require_positive(timeout_s)
        async with self._turn:
            pool = self._pool()
            async with pool.running():
                lost = await self._drop_if_lost(pool)
                worker = await self._worker(pool)
                try:
                    execution = await worker.execute(code, timeout_s)
                finally:
                    if not worker.is_alive:
                        await self._end()
        return add_notes(execution, self._limits, state_lost=lost or execution.ended)

    async def reset(self) -> None:
        """Forget everything; the next call starts a fresh process."""
        async with self._turn:
            await self._end()

    async def close(self) -> None:
        """End the process."""
        await self.reset()

    async def _drop_if_lost(self, pool: Pool) -> bool:
        """Return whether the process has ended since the last call, and forget it if so."""
        held = self._held
        if held.worker is None or (held.pool is pool and held.worker.is_alive):
            return False
        await self._end()
        return True

    async def _worker(self, pool: Pool) -> Worker:
        held = self._held
        if held.worker is None:
            await pool.take_place()
            try:
                held.worker = await pool.worker()
            except BaseException:
                pool.places.release()
                raise
            held.pool = pool
        return held.worker

    async def _end(self) -> None:
        worker, pool = self._held.worker, self._held.pool
        self._held.worker = self._held.pool = None
        if worker is not None and pool is not None:
            pool.places.release()
            await worker.close()


def require_positive(timeout_s: float) -> None:
    """Raise InvalidInput unless `timeout_s` is above 0."""
    if not timeout_s > 0:
        raise InvalidInput(f"timeout_s is {timeout_s}.", remedy="Use seconds above 0.")


def add_notes(execution: Execution, limits: Limits, *, state_lost: bool = False) -> Execution:
    """Return the execution with notes about output that was cut and state that was lost."""
    out, err = execution.stdout, execution.stderr
    if execution.truncated:
        note = f"[output was cut at {limits.max_output_bytes} bytes]\n"
        if len(out.encode()) >= len(err.encode()):
            out = f"{out}\n{note}"
        else:
            err = f"{err}\n{note}"
    if state_lost:
        err += "The interpreter was restarted: everything defined before is lost.\n"
    return replace(execution, stdout=out, stderr=err)


def _let_go(held: _Held) -> None:
    """Drop the worker, which ends it, and give its place back; callable on any thread."""
    pool, held.worker, held.pool = held.pool, None, None
    if pool is not None:
        with suppress(RuntimeError):  # the loop is closed, and its places with it
            pool.loop.call_soon_threadsafe(pool.places.release)
