r"""A sandbox for code that a model wrote.

sandbox = Sandbox()                                       # the best level that this machine has
execution = await sandbox.run("print(6 * 7)", timeout_s=5)    # a fresh interpreter for each call
execution.stdout                                          # "42\n"
session = sandbox.interpreter()                           # keeps its variables
await session.run("x = 6", timeout_s=5)
await session.run("print(x * 7)", timeout_s=5)
verdict = await sandbox.examine("def f(x): return 2 * x", "assert f(3) == 6", functions=("f",))
verdict.passed                                            # True, and not the code's own claim
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from dialoop.errors import InvalidConfig
from dialoop.sandbox.examination import examine, require_names
from dialoop.sandbox.execution import Execution, Verdict
from dialoop.sandbox.levels import AUTO, Isolation, Level
from dialoop.sandbox.limits import Limits
from dialoop.sandbox.persistent import PersistentInterpreter, add_notes, require_positive
from dialoop.sandbox.pool import Pool, PoolSize
from dialoop.sandbox.programs import bubblewrap, bubblewrap_program, rules_of
from dialoop.sandbox.self_test import effective_isolation


class Sandbox:
    """Runs Python without network, environment, processes or files of the host.

    Each interpreter has one process and one thread; it is killed on a timeout and when this process
    ends. The level is fixed when the sandbox is made; see `isolation`. Use it on one event loop at
    a time.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        *,
        level: str = AUTO,
        limits: Limits | None = None,
        max_running: int = 32,
        max_interpreters: int = 256,
        num_spares: int = 2,
        max_wait_s: float = 30.0,
        packages: tuple[str, ...] = (),
    ) -> None:
        """Make a sandbox; Unavailable (SANDBOX_LEVEL_MISSING) when the machine lacks the level.

        Code can import from the folders in `packages` (site-packages, say) besides the standard
        library.
        """
        if max_running < 1 or max_interpreters < 1 or num_spares < 0 or max_wait_s <= 0:
            raise InvalidConfig(
                "`max_running`, `max_interpreters`, `num_spares` or `max_wait_s` is too small.",
                remedy="Use values above 0; num_spares may be 0.",
            )
        self._isolation, self._limits = effective_isolation(level), limits or Limits()
        self._rules = rules_of(self._isolation.level, self._limits, packages)
        self._program: list[str] | None = None
        if self._isolation.level is Level.BUBBLEWRAP:
            self._program = bubblewrap_program(bubblewrap() or "", self._limits, self._rules)
        self._pool: Pool | None = None
        self._size = PoolSize(
            max_running=max_running,
            max_interpreters=max_interpreters,
            num_spares=num_spares,
            max_wait_s=max_wait_s,
        )

    @property
    def isolation(self) -> Isolation:
        """Return the level in effect and what it denies."""
        return self._isolation

    @property
    def limits(self) -> Limits:
        """Return the limits of one interpreter."""
        return self._limits

    async def start(self) -> None:
        """Start the fork server now, so that the first call does not wait for it."""
        async with self._current().running():
            await (await self._current().worker()).close()

    async def run(self, code: str, *, timeout_s: float = 10.0) -> Execution:
        """Run code in its own interpreter, which ends with it.

        The wait for a turn does not count towards `timeout_s`. Raise CapacityExhausted when no turn
        comes, and Unavailable (SANDBOX_FAILED) when no interpreter can be started.
        """
        require_positive(timeout_s)
        pool = self._current()
        async with pool.running():
            worker = await pool.worker()
            try:
                execution = await worker.execute(code, timeout_s)
            finally:
                await worker.close()
        return add_notes(execution, self._limits)

    async def examine(
        self, code: str, tests: str, *, functions: Sequence[str], timeout_s: float = 10.0
    ) -> Verdict:
        """Test code as a black box: the tests run in a second interpreter and call `functions`.

        The tests are Python that the caller trusts. In them each name of `functions` is a function
        that sends its arguments to the code's interpreter and returns the result, as a copy of
        built-in types (numbers, texts, bytes, lists, tuples, dicts, sets, booleans, None). An
        exception of a built-in class comes back as that class; whatever else goes wrong there is a
        RuntimeError. The code sees the arguments and nothing else of the tests. `timeout_s` is for
        all together. Raise InvalidInput for a name that is none, and what `run` raises.
        """
        require_positive(timeout_s)
        require_names(functions)
        pool = self._current()
        async with pool.running():
            theirs = await pool.worker()
            try:
                ours = await pool.worker()
                try:
                    verdict = await examine(theirs, ours, code, tests, functions, timeout_s)
                finally:
                    await ours.close()
            finally:
                await theirs.close()
        return replace(
            verdict,
            tests=add_notes(verdict.tests, self._limits),
            code=add_notes(verdict.code, self._limits),
        )

    def interpreter(self) -> PersistentInterpreter:
        """Return an interpreter that keeps its variables; it starts with its first code."""
        return PersistentInterpreter(self._current, self._limits)

    async def close(self) -> None:
        """End every interpreter; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _current(self) -> Pool:
        pool, loop = self._pool, asyncio.get_running_loop()
        if pool is None or pool.loop is not loop or not pool.is_alive:
            if pool is not None:
                pool.close()
            pool = self._pool = Pool(self._rules, self._program, self._size)
        return pool
