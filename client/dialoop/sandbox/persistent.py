"""An interpreter that keeps what the code before defined: one per session, shared with none."""

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
    """What an interpreter owns while it has a process."""

    pool: Pool | None = None
    worker: Worker | None = None


class PersistentInterpreter:
    """Runs code in one process, one piece at a time; a piece that ends the process loses the state.

    Dropping the last reference ends the process.
    """

    def __init__(self, pool: Callable[[], Pool], limits: Limits) -> None:
        self._pool, self._limits = pool, limits
        self._held = _Held()
        self._turn = asyncio.Lock()
        weakref.finalize(self, _let_go, self._held)

    async def run(self, code: str, *, timeout_s: float = 10.0) -> Execution:
        """Run code after what ran before.

        After a timeout or a crash `ended` is true, `stderr` says that the state is lost, and the
        next call starts a fresh process. Errors as `Sandbox.run`.
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
        return noted(execution, self._limits, state_lost=lost or execution.ended)

    async def reset(self) -> None:
        """Forget everything: the next call starts a fresh process."""
        async with self._turn:
            await self._end()

    async def close(self) -> None:
        """End the process."""
        await self.reset()

    async def _drop_if_lost(self, pool: Pool) -> bool:
        """Whether there was a process that ended between two calls."""
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
    """InvalidInput unless there is time to run in."""
    if not timeout_s > 0:
        raise InvalidInput("timeout_s is not above 0.", remedy="Give the code some seconds.")


def noted(execution: Execution, limits: Limits, *, state_lost: bool = False) -> Execution:
    """The same with a note where output was cut, and where the state was lost."""
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
    """On any thread: the worker ends by itself when it is dropped, its place is given back."""
    pool, held.worker, held.pool = held.pool, None, None
    if pool is not None:
        with suppress(RuntimeError):  # the loop is closed, and its places with it
            pool.loop.call_soon_threadsafe(pool.places.release)
